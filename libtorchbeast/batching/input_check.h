// SPDX-License-Identifier: Apache-2.0
// Checks that a nest can be batched with others before it is accepted.

#pragma once

#include <memory>
#include <string>

#include "libtorchbeast/memory/array_ops.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// Formats dtype and shape: "uint8[1, 4, 84, 84]".
inline std::string summary(const Array& array) {
  return std::string(info(array.dtype()).name) + to_string(array.shape());
}

// Throws std::invalid_argument if a leaf lacks the batch dimension.
inline void check_batch_dimension(const ArrayNest& nest, std::size_t batch_dim) {
  nest::for_each(
      [&](const Array& array) {
        if (array.ndim() > batch_dim) return;
        throw std::invalid_argument(
            "Enqueued tensors must have more than batch_dim == " + std::to_string(batch_dim) +
            " dimensions, but got " + std::to_string(array.ndim()));
      },
      nest);
}

// Throws std::invalid_argument if a leaf lacks the batch dimension, or if there is no leaf.
inline void check_batchable(const ArrayNest& nest, std::size_t batch_dim) {
  check_batch_dimension(nest, batch_dim);
  if (nest::empty(nest)) throw std::invalid_argument("Cannot enqueue empty vector of tensors");
}

// Remembers the first nest and rejects any nest that could not be joined with it.
//
// Only the caller of a bad nest gets the error; the other callers' batch is not affected.
// Thread safety: check() may be called from any number of threads.
class SameAsFirst {
 public:
  explicit SameAsFirst(std::size_t batch_dim) : batch_dim_(batch_dim) {}

  // Throws nest::NestError if the structure differs, and std::invalid_argument if a dtype or shape
  // differs; the message shows both sides.
  void check(const ArrayNest& nest) EXCLUDES(mutex_) {
    const std::shared_ptr<const ArrayNest> first = remember(nest);
    nest::for_each2_with_path([&](const nest::Path& path, const Array& expected,
                                  const Array& got) { check_leaf(path, expected, got); },
                              *first, nest);
  }

 private:
  std::shared_ptr<const ArrayNest> remember(const ArrayNest& nest) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!first_) first_ = std::make_shared<const ArrayNest>(without_bytes(nest));
    return first_;
  }

  // Keeps dtype and shape only, so that the queue does not keep the first item's memory alive.
  ArrayNest without_bytes(const ArrayNest& nest) const {
    return nest::map(
        [&](const Array& array) {
          Shape shape = array.shape();
          if (shape.size() > batch_dim_) shape[batch_dim_] = 0;
          return Array::spec(array.dtype(), shape);
        },
        nest);
  }

  void check_leaf(const nest::Path& path, const Array& expected, const Array& got) const {
    if (joinable(expected, got, batch_dim_)) return;
    throw std::invalid_argument("expected every item like the first, with " + pattern(expected) +
                                " at " + path.str() + ", but got " + summary(got));
  }

  // Formats dtype and shape with any size in the batch dimension: "float32[4, *, 2]".
  std::string pattern(const Array& array) const {
    std::string text = std::string(info(array.dtype()).name) + "[";
    for (std::size_t d = 0; d < array.ndim(); ++d) {
      text += (d == 0 ? "" : ", ") + (d == batch_dim_ ? "*" : std::to_string(array.size(d)));
    }
    return text + "]";
  }

  const std::size_t batch_dim_;
  Mutex mutex_;
  std::shared_ptr<const ArrayNest> first_ GUARDED_BY(mutex_);
};

}  // namespace torchbeast
