// SPDX-License-Identifier: Apache-2.0
// What fuzzers demand of the core.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace torchbeast::fuzzing {

// Ends the process, which libFuzzer reports with the input, unless `holds`.
inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

// Runs `body`; returns false if it refuses the input. Any other exception ends the process.
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
