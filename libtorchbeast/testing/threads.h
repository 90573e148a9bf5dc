// SPDX-License-Identifier: Apache-2.0
// Tools for concurrent tests: threads are ordered by events, never by sleeping.

#pragma once

#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "libtorchbeast/support/sync.h"
#include "libtorchbeast/testing/stacks.h"

namespace torchbeast::testing {

// How long a test waits for an event before it fails.
inline constexpr auto kPatience = std::chrono::seconds(60);

// A wait for an event, which begins with its construction.
class Patience {
 public:
  Clock::time_point end() const { return end_; }
  bool is_over() const { return Clock::now() >= end_; }

  // Ends the whole test program, because a thread that hangs cannot be ended. Prints where all
  // threads are, and what the process did meanwhile: one that was stopped did nothing.
  [[noreturn]] void die(const std::string& what) const {
    const rusage now = used();
    std::fprintf(
        stderr,
        "FATAL: %s did not happen within %d s, in which the process used %.1f s of CPU and "
        "its threads were switched %ld times\n",
        what.c_str(), static_cast<int>(kPatience.count()), seconds(now) - seconds(before_),
        switches(now) - switches(before_));
    print_stacks();
    std::abort();
  }

 private:
  static rusage used() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return usage;
  }
  static double seconds(const rusage& usage) {
    const auto of = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
    };
    return of(usage.ru_utime) + of(usage.ru_stime);
  }
  static long switches(const rusage& usage) { return usage.ru_nvcsw + usage.ru_nivcsw; }

  const Clock::time_point end_ = Clock::now() + kPatience;
  const rusage before_ = used();
};

// An event that happens once and that any number of threads may wait for.
class Notification {
 public:
  void notify() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    happened_ = true;
    changed_.notify_all();
  }

  void wait() EXCLUDES(mutex_) {
    const Patience patience;
    MutexLock lock(mutex_);
    while (!happened_) {
      if (!changed_.wait_until(mutex_, patience.end()) && patience.is_over()) {
        patience.die("an event");
      }
    }
  }

  bool happened() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return happened_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool happened_ GUARDED_BY(mutex_) = false;
};

// A place in which an environment hangs until it is told to continue.
struct Hanging {
  Notification reached, go_on;
  void here() {
    reached.notify();
    go_on.wait();
  }
};

// Waits for a condition that cannot notify, such as a queue's size.
template <typename Question>
void until(const Question& question, const char* what = "a state that was waited for") {
  const Patience patience;
  while (!question()) {
    if (patience.is_over()) patience.die(what);
    std::this_thread::yield();
  }
}

// Runs a call in a separate thread.
template <typename Result>
class Background {
 public:
  explicit Background(std::function<Result()> call)
      : future_(std::async(std::launch::async, std::move(call))) {}

  // Returns the call's result, or rethrows its exception.
  Result get() {
    const Patience patience;
    if (future_.wait_until(patience.end()) != std::future_status::ready) {
      patience.die("the end of a thread");
    }
    return future_.get();
  }

 private:
  std::future<Result> future_;
};

template <typename Call>
Background(Call) -> Background<std::invoke_result_t<Call>>;

}  // namespace torchbeast::testing
