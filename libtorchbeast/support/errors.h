// SPDX-License-Identifier: Apache-2.0
// The few exceptions that a caller of the core can tell apart.
//
// Everything else is std::invalid_argument (the caller passed something wrong) or
// std::runtime_error (the object is in the wrong state). bindings/module.cc registers each once.

#pragma once

#include <stdexcept>
#include <string>

namespace torchbeast {

// A queue or batcher was closed: before the call, or while the call waited.
struct ClosedBatchingQueue : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The answer that a compute() waited for can no longer come.
struct AsyncError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A stated time passed while waiting for a peer.
struct TimeoutError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A peer could not be reached, or went away.
struct ConnectionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The environment itself raised. The message carries its own traceback.
struct EnvironmentFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr char kEnqueueToClosedQueue[] = "Enqueue to closed queue";

}  // namespace torchbeast
