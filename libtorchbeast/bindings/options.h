// SPDX-License-Identifier: Apache-2.0
// Converts options that several bound classes share.

#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

#include "libtorchbeast/batching/batching_queue.h"

namespace torchbeast::bindings {

inline std::size_t checked_batch_dim(std::int64_t batch_dim) {
  if (batch_dim >= 0) return static_cast<std::size_t>(batch_dim);
  throw std::invalid_argument("batch_dim must be >= 0, got " + std::to_string(batch_dim));
}

// The longest duration. A year is long enough, and sums of such durations do not overflow.
inline constexpr double kLongestSeconds = 365.0 * 24 * 3600;

// Converts an argument to a duration. Throws std::invalid_argument, naming the argument, if it is
// negative or NaN; the message shows it in a unit of which a second has `units`.
inline std::chrono::milliseconds from_seconds(const char* name, double seconds, double units = 1) {
  if (!(seconds >= 0)) {
    std::ostringstream message;
    message << name << " must be >= 0, got " << seconds * units;
    throw std::invalid_argument(message.str());
  }
  const double bounded = std::min(seconds, kLongestSeconds);
  return std::chrono::milliseconds(static_cast<std::int64_t>(bounded * 1000));
}

inline BatchingQueueOptions queue_options(std::int64_t minimum, std::int64_t maximum,
                                          std::optional<std::int64_t> timeout_ms) {
  BatchingQueueOptions options{.minimum_batch_size = minimum, .maximum_batch_size = maximum};
  if (timeout_ms) {
    options.timeout = from_seconds("timeout_ms", static_cast<double>(*timeout_ms) / 1000, 1000);
  }
  return options;
}

}  // namespace torchbeast::bindings
