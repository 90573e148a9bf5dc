// SPDX-License-Identifier: Apache-2.0
// The generated service. Its messages are checked before they are parsed.

#pragma once

#include "libtorchbeast/proto/checked_parsing.h"

#include "rpcenv.grpc.pb.h"  // after the header above, which specialises its templates
