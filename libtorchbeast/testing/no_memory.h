// SPDX-License-Identifier: Apache-2.0
// Makes operator new fail. array_ops_test.cc replaces it, for all tests of the program.

#pragma once

namespace torchbeast::testing {

inline thread_local bool no_memory = false;

// Within a scope, every operator new of this thread throws std::bad_alloc.
class NoMemory {
 public:
  NoMemory() { no_memory = true; }
  ~NoMemory() { no_memory = false; }
  NoMemory(const NoMemory&) = delete;
  NoMemory& operator=(const NoMemory&) = delete;
};

}  // namespace torchbeast::testing
