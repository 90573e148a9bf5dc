// SPDX-License-Identifier: Apache-2.0
// Joins, slices and repeats arrays, and nests of arrays, along one dimension.

#pragma once

#include <span>
#include <vector>

#include "libtorchbeast/memory/array.h"
#include "nest/nest.h"

namespace torchbeast {

using ArrayNest = nest::Nest<Array>;

// An array's layout as [outer, size, inner] around one dimension.
struct DimSplit {
  std::int64_t outer;       // elements before the dimension
  std::int64_t size;        // of the dimension
  std::size_t inner_bytes;  // bytes of one entry of the dimension
};

inline DimSplit split_at(const Array& array, std::size_t dim) {
  const std::int64_t size = array.size(dim);  // throws if there is no such dimension
  const std::span<const std::int64_t> shape(array.shape());
  return {num_elements(shape.first(dim)), size,
          static_cast<std::size_t>(num_elements(shape.subspan(dim + 1))) *
              info(array.dtype()).item_size};
}

// Returns whether two arrays can be joined along dim: they have the same dtype, and the same shape
// in all other dimensions.
inline bool joinable(const Array& a, const Array& b, std::size_t dim) {
  if (a.dtype() != b.dtype() || a.ndim() != b.ndim()) return false;
  for (std::size_t d = 0; d < a.ndim(); ++d) {
    if (d != dim && a.size(d) != b.size(d)) return false;
  }
  return true;
}

// Concatenates arrays along dim, followed by `spare` uninitialised entries of dim. If there is a
// single array and no spare entries, returns the array itself, without a copy.
inline Array join(std::span<const Array* const> parts, std::size_t dim, std::int64_t spare = 0) {
  if (parts.size() == 1 && spare == 0) return *parts[0];
  Shape shape = parts[0]->shape();
  shape.at(dim) = spare;
  for (const Array* part : parts) shape[dim] += part->size(dim);
  Array joined(parts[0]->dtype(), shape);
  const DimSplit whole = split_at(joined, dim);
  const std::size_t whole_stride = static_cast<std::size_t>(whole.size) * whole.inner_bytes;
  std::size_t offset = 0;
  for (const Array* part : parts) {
    const std::size_t chunk = static_cast<std::size_t>(part->size(dim)) * whole.inner_bytes;
    for (std::int64_t o = 0; chunk > 0 && o < whole.outer; ++o) {
      std::memcpy(joined.data() + static_cast<std::size_t>(o) * whole_stride + offset,
                  part->data() + static_cast<std::size_t>(o) * chunk, chunk);
    }
    offset += chunk;
  }
  return joined;
}

// Returns entries [start, start + length) of dim. Shares the bytes if they are contiguous.
inline Array narrow(const Array& array, std::size_t dim, std::int64_t start, std::int64_t length) {
  const DimSplit split = split_at(array, dim);
  if (start == 0 && length == split.size) return array;
  if (start < 0 || length < 0 || start + length > split.size) {
    throw std::invalid_argument("entries " + std::to_string(start) + " to " +
                                std::to_string(start + length) + " of dimension " +
                                std::to_string(dim) + " do not lie in shape " +
                                to_string(array.shape()));
  }
  Shape shape = array.shape();
  shape[dim] = length;
  if (split.outer == 1) {
    Shape from_dim(shape.begin() + static_cast<std::ptrdiff_t>(dim), shape.end());
    from_dim[0] = split.size;
    return array.reshaped(from_dim).rows(start, length).reshaped(shape);
  }
  Array part(array.dtype(), shape);
  const std::size_t chunk = static_cast<std::size_t>(length) * split.inner_bytes;
  const std::size_t stride = static_cast<std::size_t>(split.size) * split.inner_bytes;
  for (std::int64_t o = 0; chunk > 0 && o < split.outer; ++o) {
    std::memcpy(part.data() + static_cast<std::size_t>(o) * chunk,
                array.data() + static_cast<std::size_t>(o) * stride +
                    static_cast<std::size_t>(start) * split.inner_bytes,
                chunk);
  }
  return part;
}

// Concatenates `times` copies of an array along dim.
inline Array repeat(const Array& array, std::size_t dim, std::int64_t times) {
  const std::vector<const Array*> parts(static_cast<std::size_t>(times), &array);
  return join(parts, dim).clone();
}

// Returns the bytes of all leaves; exact up to 2^53, and cannot overflow.
inline double num_bytes(const ArrayNest& nest) {
  double bytes = 0;
  nest::for_each([&](const Array& leaf) { bytes += static_cast<double>(leaf.num_bytes()); }, nest);
  return bytes;
}

// Prepends `dims` dimensions of size 1 to each leaf; shares the bytes.
inline ArrayNest with_leading(const ArrayNest& nest, std::size_t dims) {
  return nest::map(
      [dims](const Array& leaf) {
        Shape shape(dims, 1);
        shape.insert(shape.end(), leaf.shape().begin(), leaf.shape().end());
        return leaf.reshaped(std::move(shape));
      },
      nest);
}

// Removes the first `dims` dimensions of each leaf, which must have size 1; shares the bytes.
inline ArrayNest without_leading(const ArrayNest& nest, std::size_t dims) {
  return nest::map(
      [dims](const Array& leaf) {
        const auto end = leaf.shape().end();
        const auto rest = leaf.shape().begin() + std::min(dims, leaf.ndim());
        if (leaf.ndim() < dims ||
            std::count(leaf.shape().begin(), rest, 1) != rest - leaf.shape().begin()) {
          throw std::invalid_argument("expected a shape that begins with " +
                                      to_string(Shape(dims, 1)) + ", got " +
                                      to_string(leaf.shape()));
        }
        return leaf.reshaped({rest, end});
      },
      nest);
}

// Concatenates nests of equal structure, leaf by leaf, as above.
inline ArrayNest join(std::span<const ArrayNest* const> nests, std::size_t dim,
                      std::int64_t spare = 0) {
  std::vector<std::vector<Array>> leaves;  // [nest][leaf]
  leaves.reserve(nests.size());
  for (const ArrayNest* nest : nests) leaves.push_back(nest::flatten(*nest));
  std::vector<Array> joined;
  std::vector<const Array*> parts(nests.size());
  for (std::size_t leaf = 0; leaf < leaves[0].size(); ++leaf) {
    for (std::size_t i = 0; i < nests.size(); ++i) parts[i] = &leaves[i].at(leaf);
    joined.push_back(join(std::span<const Array* const>(parts), dim, spare));
  }
  return nest::pack_as(*nests[0], joined);
}

// Narrows every leaf, as above.
inline ArrayNest narrow(const ArrayNest& nest, std::size_t dim, std::int64_t start,
                        std::int64_t length) {
  return nest::map([&](const Array& array) { return narrow(array, dim, start, length); }, nest);
}

}  // namespace torchbeast
