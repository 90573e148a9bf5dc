// SPDX-License-Identifier: Apache-2.0
// A monotonic clock that stands still while the process does not run.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <ratio>

namespace torchbeast {

// Adds up the time between readings of another clock, without pauses of the process.
//
// A process that SIGSTOP, a container's freezer or a batch system has stopped must not charge that
// time to the peers that it waits for. Nothing tells it how long it was stopped. But whoever waits
// reads the clock every second (CondVar::wait_until), so a longer time between two readings was
// mostly such a pause, and counts as kLongest.
//
// Thread safety: any thread may read it. It has no lock: streams read it several times a step, and
// a fork would inherit a lock that another thread holds.
class RunningTime {
 public:
  using duration = std::chrono::steady_clock::duration;
  static constexpr duration kLongest = std::chrono::seconds(5);

  explicit RunningTime(duration now) : last_(Reading{std::chrono::floor<Tenths>(now), Tenths(0)}) {}

  // Reads the other clock, now(); returns the time so far.
  template <typename Now>
  duration read(Now now) {
    Reading last = last_;
    for (;;) {
      const duration present = now();  // after the last reading, which may follow a pause
      const Tenths at = std::chrono::floor<Tenths>(present);
      const Tenths pause = at - last.at - std::chrono::duration_cast<Tenths>(kLongest);
      const Tenths stopped = last.stopped + std::max(Tenths(0), pause);
      if (at <= last.at || last_.compare_exchange_weak(last, Reading{at, stopped})) {
        return present - stopped;
      }
    }
  }

 private:
  using Tenths = std::chrono::duration<std::int32_t, std::deci>;  // of a second; for seven years
  struct Reading {
    Tenths at;       // by the other clock
    Tenths stopped;  // in all pauses before
  };

  std::atomic<Reading> last_;
  static_assert(std::atomic<Reading>::is_always_lock_free);
};

// The clock of the core, with one RunningTime for the whole process. Any thread may use it.
struct Clock {
  using duration = RunningTime::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = std::chrono::time_point<Clock>;
  static constexpr bool is_steady = true;

  static time_point now() {
    static RunningTime running(steady());
    return time_point(running.read(steady));
  }

 private:
  static duration steady() { return std::chrono::steady_clock::now().time_since_epoch(); }
};

inline double in_seconds(Clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

}  // namespace torchbeast
