// SPDX-License-Identifier: Apache-2.0
// Tools for concurrent tests: threads are ordered by events, never by sleeping.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "libtorchbeast/support/sync.h"

namespace torchbeast::testing {

// How long a test waits for an event before it fails.
inline constexpr auto kPatience = std::chrono::seconds(60);

// Ends the whole test program, because a thread that hangs cannot be ended.
[[noreturn]] inline void die(const std::string& what) {
  std::fprintf(stderr, "FATAL: %s did not happen within %d s\n", what.c_str(),
               static_cast<int>(kPatience.count()));
  std::abort();
}

// An event that happens once and that any number of threads may wait for.
class Notification {
 public:
  void notify() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    happened_ = true;
    changed_.notify_all();
  }

  void wait() EXCLUDES(mutex_) {
    const auto deadline = Clock::now() + kPatience;
    MutexLock lock(mutex_);
    while (!happened_) {
      if (!changed_.wait_until(mutex_, deadline) && Clock::now() >= deadline) die("an event");
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
  const auto deadline = Clock::now() + kPatience;
  while (!question()) {
    if (Clock::now() >= deadline) die(what);
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
    if (future_.wait_for(kPatience) != std::future_status::ready) die("the end of a thread");
    return future_.get();
  }

 private:
  std::future<Result> future_;
};

template <typename Call>
Background(Call) -> Background<std::invoke_result_t<Call>>;

}  // namespace torchbeast::testing
