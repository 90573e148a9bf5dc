// SPDX-License-Identifier: Apache-2.0
// What the fuzzers expect of the core.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace torchbeast::fuzzing {

// Ends the process unless `holds`; libFuzzer then reports the input.
inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

// Runs `body`; returns false if it rejects the input. Any other exception ends the process.
template <typename Body>
bool accepts(const Body& body) {
  try {
    body();
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

}  // namespace torchbeast::fuzzing
