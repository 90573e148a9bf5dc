// SPDX-License-Identifier: Apache-2.0
// What the C++ tests share: threads ordered by events, and short ways to write arrays down.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <initializer_list>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "libtorchbeast/array_ops.h"
#include "libtorchbeast/sync.h"

namespace torchbeast::testing {

// How long a test waits for what must happen before it says that it never did.
inline constexpr auto kPatience = std::chrono::seconds(60);

// Ends the whole test program: a thread that hangs cannot be given up in any gentler way.
[[noreturn]] inline void die(const std::string& what) {
  std::fprintf(stderr, "FATAL: %s did not happen within %d s\n", what.c_str(),
               static_cast<int>(kPatience.count()));
  std::abort();
}

// Something that happens once, and that any number of threads may wait for.
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

// An environment that hangs in one place until told to go on.
struct Hanging {
  Notification reached, go_on;
  void here() {
    reached.notify();
    go_on.wait();
  }
};

// Waits for a state that cannot notify, such as a queue's size.
template <typename Question>
void until(const Question& question, const char* what = "a state that was waited for") {
  const auto deadline = Clock::now() + kPatience;
  while (!question()) {
    if (Clock::now() >= deadline) die(what);
    std::this_thread::yield();
  }
}

// A call that runs in a thread of its own.
template <typename Result>
class Background {
 public:
  explicit Background(std::function<Result()> call)
      : future_(std::async(std::launch::async, std::move(call))) {}

  // What it returned; throws what it threw.
  Result get() {
    if (future_.wait_for(kPatience) != std::future_status::ready) die("the end of a thread");
    return future_.get();
  }

 private:
  std::future<Result> future_;
};

template <typename Call>
Background(Call) -> Background<std::invoke_result_t<Call>>;

// The message of the exception that a call threw; says so when it threw another or none.
template <typename Expected, typename Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Expected& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another exception: ") + error.what();
  }
  return "nothing was thrown";
}

template <typename T>
Array array_of(Shape shape, std::initializer_list<T> values) {
  Array array(kDTypeOf<T>, std::move(shape));
  if (array.num_elements() != static_cast<std::int64_t>(values.size())) {
    throw std::logic_error("a test wrote " + std::to_string(values.size()) + " values for shape " +
                           to_string(array.shape()));
  }
  std::copy(values.begin(), values.end(), array.as<T>());
  return array;
}

template <typename T>
std::vector<T> values_of(const Array& array) {
  return std::vector<T>(array.as<T>(), array.as<T>() + array.num_elements());
}

inline bool same_bytes(const Array& a, const Array& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         (a.num_bytes() == 0 || std::memcmp(a.data(), b.data(), a.num_bytes()) == 0);
}

inline bool same_bytes(const ArrayNest& a, const ArrayNest& b) {
  bool same = nest::same_structure(a, b);
  if (same) {
    nest::for_each2([&](const Array& x, const Array& y) { same = same && same_bytes(x, y); }, a, b);
  }
  return same;
}

// (a, b, ...)
inline ArrayNest tuple(std::vector<ArrayNest> entries) { return ArrayNest(std::move(entries)); }

}  // namespace torchbeast::testing
