// SPDX-License-Identifier: Apache-2.0
// The vector protocol: E environments per stream, newest frames only, seeded.

#pragma once

#include "libtorchbeast/stream/wire.h"

namespace torchbeast {

std::unique_ptr<Wire> make_vector_wire(const std::shared_ptr<grpc::Channel>& channel,
                                       const Credentials& credentials);

}  // namespace torchbeast
