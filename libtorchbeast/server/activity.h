// SPDX-License-Identifier: Apache-2.0
// Counts what a server does, for status requests.

#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// How busy a server is. Thread safety: any thread may use all members.
struct Activity {
  const Clock::time_point since = Clock::now();
  std::atomic<std::int64_t> open_streams = 0;
  std::atomic<std::int64_t> steps = 0;  // of environments
};

// A server already has the maximum number of open streams.
class TooManyStreams : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Counts a stream as open, for a scope. Throws TooManyStreams if there are then more than `limit`.
class OpenStream {
 public:
  OpenStream(Activity* activity, std::int64_t limit) : activity_(activity) {
    if (++activity_->open_streams <= limit) return;
    --activity_->open_streams;
    throw TooManyStreams("this environment server has " + std::to_string(limit) +
                         " open streams, which is its limit: end another learner that uses it, or "
                         "wait until the streams of one that is gone are closed");
  }
  ~OpenStream() { --activity_->open_streams; }
  OpenStream(const OpenStream&) = delete;
  OpenStream& operator=(const OpenStream&) = delete;

  void count(std::int64_t steps) { activity_->steps += steps; }

 private:
  Activity* activity_;
};

}  // namespace torchbeast
