// SPDX-License-Identifier: Apache-2.0
// The generated service, whose messages are checked before they are parsed.

#pragma once

#include "libtorchbeast/proto/checked_parsing.h"

#include "rpcenv.grpc.pb.h"  // after the above, which specialises what it instantiates
