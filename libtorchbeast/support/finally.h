// SPDX-License-Identifier: Apache-2.0
// Runs a function at the end of a scope.

#pragma once

#include <utility>

namespace torchbeast {

// Calls `end`, which must not throw, when the scope ends, also by an exception:
//
//   ++open_;
//   const Finally closed([this] { --open_; });
template <typename End>
class [[nodiscard]] Finally {
 public:
  explicit Finally(End end) : end_(std::move(end)) {}
  ~Finally() { end_(); }
  Finally(const Finally&) = delete;
  Finally& operator=(const Finally&) = delete;

 private:
  End end_;
};

}  // namespace torchbeast
