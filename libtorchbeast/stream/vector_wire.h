// SPDX-License-Identifier: Apache-2.0
// The protocol of our own servers: E environments per stream, new frames only, a seed.

#pragma once

#include "libtorchbeast/stream/wire.h"

namespace torchbeast {

std::unique_ptr<Wire> make_vector_wire(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace torchbeast
