// SPDX-License-Identifier: Apache-2.0
// Counts what a server does, for whoever asks for its status.

#pragma once

#include <atomic>
#include <cstdint>

#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// How busy a server is. Thread safety: all members may be used by any thread.
struct Activity {
  const Clock::time_point since = Clock::now();
  std::atomic<std::int64_t> open_streams = 0;
  std::atomic<std::int64_t> steps = 0;  // of environments
};

// Counts a stream as open for a scope.
class OpenStream {
 public:
  explicit OpenStream(Activity* activity) : activity_(activity) { ++activity_->open_streams; }
  ~OpenStream() { --activity_->open_streams; }
  OpenStream(const OpenStream&) = delete;
  OpenStream& operator=(const OpenStream&) = delete;

  void count(std::int64_t steps) { activity_->steps += steps; }

 private:
  Activity* activity_;
};

}  // namespace torchbeast
