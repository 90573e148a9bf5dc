// SPDX-License-Identifier: Apache-2.0
// Converts Array and ArrayNest to and from messages. All validation of a peer's arrays is here.

#pragma once

#include "libtorchbeast/memory/array_ops.h"
#include "rpcenv.pb.h"

namespace torchbeast::codec {

// The maximum size of a message in either direction. gRPC's default of 4 MiB is too small for
// stacks of frames from many environments.
inline constexpr int kMaxMessageBytes = 256 << 20;

// The maximum number of dimensions, as in numpy 1.
inline constexpr int kMaxDimensions = 32;

// The maximum number of arrays, vectors and maps in one nest. Even an empty one costs memory.
inline constexpr int kMaxArrays = 1 << 16;

// Decodes a message. Throws std::invalid_argument, with a message that shows both sides, unless the
// dtype is known, no dimension is negative or overflows, the data has exactly shape x item size
// bytes, and the nest is at most nest::kMaxDepth deep.
Array decode(const rpcenv::NDArray& message);
ArrayNest decode(const rpcenv::ArrayNest& message);

// Decodes dtype and shape of arrays without data, as in Description.observation. Throws for the
// same reasons.
ArrayNest decode_spec(const rpcenv::ArrayNest& message);

void encode(const Array& array, rpcenv::NDArray* message);
// Throws std::invalid_argument if the nest contains an empty vector or map, which the format cannot
// represent.
void encode(const ArrayNest& nest, rpcenv::ArrayNest* message);
void encode_spec(const ArrayNest& nest, rpcenv::ArrayNest* message);

}  // namespace torchbeast::codec
