// SPDX-License-Identifier: Apache-2.0
// Short ways to write arrays, nests and expected error messages in tests and fuzzers.

#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libtorchbeast/memory/array_ops.h"

namespace torchbeast::testing {

// Returns the message of the exception that a call throws, or says that the call threw another
// exception or none.
template <typename Expected, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
  return "nothing was thrown";
}

// Makes an array of the given values, in C order.
template <typename T>
Array array_of(Shape shape, std::initializer_list<T> values) {
  Array array(kDTypeOf<T>, std::move(shape));
  if (array.num_elements() != static_cast<std::int64_t>(values.size())) {
    throw std::logic_error("a test wrote " + std::to_string(values.size()) + " values for shape " +
                           to_string(array.shape()));
  }
  std::copy(values.begin(), values.end(), array.as<T>());
  return array;
}

// Returns the elements in C order.
template <typename T>
std::vector<T> values_of(const Array& array) {
  return std::vector<T>(array.as<T>(), array.as<T>() + array.num_elements());
}

inline bool same_bytes(const Array& a, const Array& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         (a.num_bytes() == 0 || std::memcmp(a.data(), b.data(), a.num_bytes()) == 0);
}

inline bool same_bytes(const ArrayNest& a, const ArrayNest& b) {
  bool same = nest::same_structure(a, b);
  if (same) {
    nest::for_each2([&](const Array& x, const Array& y) { same = same && same_bytes(x, y); }, a, b);
  }
  return same;
}

// Makes the nest (a, b, ...).
inline ArrayNest tuple(std::vector<ArrayNest> entries) { return ArrayNest(std::move(entries)); }

}  // namespace torchbeast::testing
