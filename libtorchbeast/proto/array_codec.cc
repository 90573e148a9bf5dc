// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/proto/array_codec.h"

#include <bit>
#include <map>
#include <string>

namespace torchbeast::codec {
namespace {

static_assert(std::endian::native == std::endian::little,
              "the wire is little endian and arrays are sent byte for byte");

DType checked_dtype(const rpcenv::NDArray& message) {
  if (const auto dtype = dtype_from_number(message.dtype())) return *dtype;
  throw std::invalid_argument("array has dtype number " + std::to_string(message.dtype()) +
                              ", expected one of bool, (u)int8 to 64, float16 to 64 "
                              "(0 to 8, 11, 12, 23)");
}

Shape checked_shape(const rpcenv::NDArray& message) {
  if (message.shape_size() > kMaxDimensions) {
    throw std::invalid_argument("array has " + std::to_string(message.shape_size()) +
                                " dimensions, expected at most " + std::to_string(kMaxDimensions));
  }
  std::int64_t elements =
      1;  // ignores zeros, because partial products of the shape must not overflow either
  for (const std::int64_t size : message.shape()) {
    if (size < 0 || size > kMaxMessageBytes ||
        (elements *= std::max(size, std::int64_t{1})) > kMaxMessageBytes) {
      throw std::invalid_argument("array dimension " + std::to_string(size) +
                                  " is negative or makes the array larger than a message may be");
    }
  }
  return {message.shape().begin(), message.shape().end()};
}

void check_size(const rpcenv::NDArray& message, DType dtype, const Shape& shape) {
  const auto expected = static_cast<std::size_t>(num_elements(shape)) * info(dtype).item_size;
  if (message.data().size() == expected) return;
  throw std::invalid_argument("array of shape " + to_string(shape) + " and dtype " +
                              std::string(info(dtype).name) + " needs " + std::to_string(expected) +
                              " bytes, got " + std::to_string(message.data().size()));
}

Array decode_array_spec(const rpcenv::NDArray& message) {
  return Array::spec(checked_dtype(message), checked_shape(message));
}

// Decodes a nest; `leaf` makes an Array of an NDArray, *arrays counts the nodes still allowed.
template <typename Leaf>
ArrayNest decode_nest(const rpcenv::ArrayNest& message, const Leaf& leaf, int depth, int* arrays) {
  if (depth > static_cast<int>(nest::kMaxDepth)) {
    throw std::invalid_argument("arrays are nested deeper than " + std::to_string(nest::kMaxDepth) +
                                " levels");
  }
  if (--*arrays < 0) {
    throw std::invalid_argument("a nest has more than " + std::to_string(kMaxArrays) +
                                " arrays, tuples and dicts");
  }
  if (message.has_array()) return ArrayNest(leaf(message.array()));
  if (message.vector_size() > 0) {
    std::vector<ArrayNest> vector;
    for (const auto& entry : message.vector()) {
      vector.push_back(decode_nest(entry, leaf, depth + 1, arrays));
    }
    return ArrayNest(std::move(vector));
  }
  if (message.map_size() > 0) {
    ArrayNest::Map map;
    for (const auto& [key, entry] : message.map()) {
      map.emplace(key, decode_nest(entry, leaf, depth + 1, arrays));
    }
    return ArrayNest(std::move(map));
  }
  throw std::invalid_argument("expected an array, a vector or a map of arrays, got none of them");
}

template <typename Leaf>
void encode_nest(const ArrayNest& nest, rpcenv::ArrayNest* message, const Leaf& leaf) {
  if (nest.is_leaf()) return leaf(nest.as_leaf(), message->mutable_array());
  if (nest.is_vector()) {
    for (const ArrayNest& entry : nest.as_vector()) encode_nest(entry, message->add_vector(), leaf);
  } else {
    for (const auto& [key, entry] : nest.as_map()) {
      encode_nest(entry, &(*message->mutable_map())[key], leaf);
    }
  }
  if (message->vector_size() == 0 && message->map_size() == 0) {
    throw std::invalid_argument("an empty tuple or dict cannot be sent: the wire format has none");
  }
}

void encode_array_spec(const Array& array, rpcenv::NDArray* message) {
  message->set_dtype(static_cast<std::int32_t>(array.dtype()));
  message->mutable_shape()->Clear();
  message->mutable_shape()->Add(array.shape().begin(), array.shape().end());
}

}  // namespace

Array decode(const rpcenv::NDArray& message) {
  const DType dtype = checked_dtype(message);
  Shape shape = checked_shape(message);
  check_size(message, dtype, shape);
  Array array(dtype, std::move(shape));
  if (array.num_bytes() > 0) {
    std::memcpy(array.data(), message.data().data(), array.num_bytes());
  }
  if (dtype ==
      DType::kBool) {  // reading any byte other than 0 and 1 as bool is undefined behaviour
    for (std::size_t i = 0; i < array.num_bytes(); ++i) {
      array.data()[i] = static_cast<std::byte>(array.data()[i] != std::byte{0});
    }
  }
  return array;
}

ArrayNest decode(const rpcenv::ArrayNest& message) {
  int arrays = kMaxArrays;
  return decode_nest(
      message, [](const rpcenv::NDArray& array) { return decode(array); }, 0, &arrays);
}

ArrayNest decode_spec(const rpcenv::ArrayNest& message) {
  int arrays = kMaxArrays;
  return decode_nest(message, decode_array_spec, 0, &arrays);
}

void encode(const Array& array, rpcenv::NDArray* message) {
  encode_array_spec(array, message);
  message->set_data(array.data(), array.num_bytes());
}

void encode(const ArrayNest& nest, rpcenv::ArrayNest* message) {
  encode_nest(nest, message,
              [](const Array& array, rpcenv::NDArray* leaf) { encode(array, leaf); });
}

void encode_spec(const ArrayNest& nest, rpcenv::ArrayNest* message) {
  encode_nest(nest, message, encode_array_spec);
}

}  // namespace torchbeast::codec
