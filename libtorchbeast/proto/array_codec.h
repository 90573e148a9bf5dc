// SPDX-License-Identifier: Apache-2.0
// NDArray <-> Array, and nests of them. The one place that distrusts the peer.

#pragma once

#include "libtorchbeast/memory/array_ops.h"
#include "rpcenv.pb.h"

namespace torchbeast::codec {

// The most bytes that one message may have, either way. gRPC's own default of 4 MiB is too little
// for stacks of frames from many environments.
inline constexpr int kMaxMessageBytes = 256 << 20;

// Arrays of more dimensions are refused, as numpy 1 did.
inline constexpr int kMaxDimensions = 32;

// The most arrays, vectors and maps in one nest: each costs memory, however small it is.
inline constexpr int kMaxArrays = 1 << 16;

// Reading checks everything: dtype known, no negative or overflowing size, bytes == shape x item
// size, nesting no deeper than nest::kMaxDepth. Throws std::invalid_argument naming both sides.
Array decode(const rpcenv::NDArray& message);
ArrayNest decode(const rpcenv::ArrayNest& message);

// Dtype and shape of arrays that carry no data, as in Description.observation.
ArrayNest decode_spec(const rpcenv::ArrayNest& message);

void encode(const Array& array, rpcenv::NDArray* message);
// Throws std::invalid_argument for an empty vector or map, which the format cannot express.
void encode(const ArrayNest& nest, rpcenv::ArrayNest* message);
void encode_spec(const ArrayNest& nest, rpcenv::ArrayNest* message);

}  // namespace torchbeast::codec
