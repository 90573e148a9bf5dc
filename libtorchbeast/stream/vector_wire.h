// SPDX-License-Identifier: Apache-2.0
// The vector protocol: E environments per stream, newest frames only, seeded.

#pragma once

#include "libtorchbeast/stream/wire.h"

namespace rpcenv {
class VectorStep;
}

namespace torchbeast {

// Decodes a step. Throws std::invalid_argument if its arrays are invalid; see array_codec.h.
RawStep raw_step(const rpcenv::VectorStep& message);

std::unique_ptr<Wire> make_vector_wire(const std::shared_ptr<grpc::Channel>& channel,
                                       const Credentials& credentials);

}  // namespace torchbeast
