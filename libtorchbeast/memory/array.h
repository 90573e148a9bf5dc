// SPDX-License-Identifier: Apache-2.0
// Array: dtype, shape and owned bytes. The core's only tensor type.

#pragma once

#include <absl/container/inlined_vector.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "libtorchbeast/memory/buffer.h"
#include "libtorchbeast/memory/dtype.h"

namespace torchbeast {

// Up to six dimensions are stored inline, without an allocation.
using Shape = absl::InlinedVector<std::int64_t, 6>;

// Formats a shape: "[2, 3]".
inline std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + "]";
}

inline std::int64_t num_elements(std::span<const std::int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

// A dense array in C order.
//
// Copying an Array shares its bytes, like copying a shared_ptr; clone() copies them.
// Thread safety: as for a shared_ptr. A thread that writes to data() must be the only user of the
// bytes.
class Array {
 public:
  Array() : Array(DType::kUInt8, {0}) {}

  // Makes an uninitialised array. Throws std::invalid_argument if a dimension is negative.
  Array(DType dtype, Shape shape)
      : dtype_(dtype), shape_(std::move(shape)), num_bytes_(checked_num_bytes(dtype_, shape_)) {
    data_ = BufferPool::instance().allocate(num_bytes_);
  }

  // Makes an array that only describes other arrays by dtype and shape: data() is null.
  static Array spec(DType dtype, Shape shape) {
    Array array;
    array.dtype_ = dtype;
    array.num_bytes_ = checked_num_bytes(dtype, shape);
    array.shape_ = std::move(shape);
    array.data_ = nullptr;
    return array;
  }

  static Array zeros(DType dtype, Shape shape) {
    Array array(dtype, std::move(shape));
    std::memset(array.data(), 0, array.num_bytes());
    return array;
  }

  template <typename T>
  static Array filled(Shape shape, T value) {
    Array array(kDTypeOf<T>, std::move(shape));
    std::fill_n(array.as<T>(), array.num_elements(), value);
    return array;
  }

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::size_t ndim() const { return shape_.size(); }
  std::int64_t size(std::size_t dim) const { return shape_.at(dim); }
  std::int64_t num_elements() const { return torchbeast::num_elements(shape_); }
  std::size_t num_bytes() const { return num_bytes_; }
  std::byte* data() { return data_.get(); }
  const std::byte* data() const { return data_.get(); }
  const std::shared_ptr<std::byte>& owner() const { return data_; }

  // Returns the elements as T. Throws std::logic_error if the array has another dtype.
  template <typename T>
  T* as() {
    check_dtype(kDTypeOf<T>);
    return reinterpret_cast<T*>(data_.get());
  }
  template <typename T>
  const T* as() const {
    check_dtype(kDTypeOf<T>);
    return reinterpret_cast<const T*>(data_.get());
  }

  // Returns a view with another shape and the same number of elements; shares the bytes.
  Array reshaped(Shape shape) const {
    if (torchbeast::num_elements(shape) != num_elements()) {
      throw std::invalid_argument("cannot view shape " + to_string(shape_) + " as " +
                                  to_string(shape));
    }
    Array view = *this;
    view.shape_ = std::move(shape);
    return view;
  }

  // Returns rows [start, start + length) of the first dimension; shares the bytes.
  Array rows(std::int64_t start, std::int64_t length) const {
    if (ndim() == 0 || start < 0 || length < 0 || start + length > shape_[0]) {
      throw std::invalid_argument("rows " + std::to_string(start) + " to " +
                                  std::to_string(start + length) + " do not lie in shape " +
                                  to_string(shape_));
    }
    Array view = *this;
    const std::size_t row_bytes =
        shape_[0] == 0 ? 0 : num_bytes_ / static_cast<std::size_t>(shape_[0]);
    view.shape_[0] = length;
    view.num_bytes_ = row_bytes * static_cast<std::size_t>(length);
    view.data_ = {data_, data_.get() + row_bytes * static_cast<std::size_t>(start)};
    return view;
  }

  // Copies the bytes.
  Array clone() const {
    Array copy(dtype_, shape_);
    if (num_bytes_ > 0) std::memcpy(copy.data(), data(), num_bytes_);
    return copy;
  }

 private:
  static std::size_t checked_num_bytes(DType dtype, const Shape& shape) {
    if (std::any_of(shape.begin(), shape.end(), [](std::int64_t size) { return size < 0; })) {
      throw std::invalid_argument("dimensions must not be negative, got " + to_string(shape));
    }
    return static_cast<std::size_t>(torchbeast::num_elements(shape)) * info(dtype).item_size;
  }

  void check_dtype(DType wanted) const {
    if (dtype_ != wanted) {
      throw std::logic_error("array holds " + std::string(info(dtype_).name) + ", not " +
                             std::string(info(wanted).name));
    }
  }

  DType dtype_;
  Shape shape_;
  std::size_t num_bytes_;
  std::shared_ptr<std::byte> data_;
};

}  // namespace torchbeast
