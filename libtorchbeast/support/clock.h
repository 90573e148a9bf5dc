// SPDX-License-Identifier: Apache-2.0
// A monotonic clock that stands still while the process does not run.

#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>

namespace torchbeast {

// Adds up the time between readings of another clock, without pauses of the process.
//
// A process that SIGSTOP, a container's freezer or a batch system has stopped must not charge that
// time to the peers that it waits for. Nothing tells it how long it was stopped. But whoever waits
// reads the clock every second (CondVar::wait_until), so a longer time between two readings was
// mostly such a pause, and counts as kLongest.
//
// Thread safety: one thread at a time.
class RunningTime {
 public:
  using duration = std::chrono::steady_clock::duration;
  static constexpr duration kLongest = std::chrono::seconds(5);

  explicit RunningTime(duration now) : last_(now), time_(now) {}

  // Takes a reading of the other clock; returns the time so far.
  duration note(duration now) {
    time_ += std::min(now - last_, kLongest);
    last_ = now;
    return time_;
  }

 private:
  duration last_, time_;
};

// The clock of the core, with one RunningTime for the whole process. Any thread may use it.
struct Clock {
  using duration = RunningTime::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;

  static time_point now() {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    static RunningTime running(steady());
    return time_point(running.note(steady()));
  }

 private:
  static duration steady() { return std::chrono::steady_clock::now().time_since_epoch(); }
};

}  // namespace torchbeast
