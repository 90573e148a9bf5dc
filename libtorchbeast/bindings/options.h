// SPDX-License-Identifier: Apache-2.0
// Options that several bound classes take from Python in the same form.

#pragma once

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>

#include "libtorchbeast/batching_queue.h"

namespace torchbeast::bindings {

inline std::size_t checked_batch_dim(std::int64_t batch_dim) {
  if (batch_dim >= 0) return static_cast<std::size_t>(batch_dim);
  throw std::invalid_argument("batch_dim must be >= 0, got " + std::to_string(batch_dim));
}

inline BatchingQueueOptions queue_options(std::int64_t minimum, std::int64_t maximum,
                                          std::optional<std::int64_t> timeout_ms) {
  BatchingQueueOptions options{.minimum_batch_size = minimum, .maximum_batch_size = maximum};
  if (timeout_ms) options.timeout = std::chrono::milliseconds(*timeout_ms);
  return options;
}

inline std::chrono::milliseconds from_seconds(double seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * 1000));
}

}  // namespace torchbeast::bindings
