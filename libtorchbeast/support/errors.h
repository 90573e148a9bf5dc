// SPDX-License-Identifier: Apache-2.0
// The exceptions that callers of the core handle in different ways.
//
// All other errors are std::invalid_argument (the caller passed something wrong) or
// std::runtime_error (the object is in the wrong state). bindings/module.cc maps each to
// its Python exception.

#pragma once

#include <stdexcept>
#include <string>

namespace torchbeast {

// A queue or batcher was closed, before the call or while the call waited.
struct ClosedBatchingQueue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The outputs that a compute() waited for will never arrive, because their batch was dropped.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A peer did not respond within the stated time.
struct TimeoutError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A peer could not be reached, or the connection to it was lost.
struct ConnectionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The environment raised an exception. The message contains its traceback.
struct EnvironmentFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace torchbeast
