// SPDX-License-Identifier: Apache-2.0
// Mutex and condition variable with the annotations that let clang check locking at compile time.
//
// clang rejects mistakes with -Wthread-safety -Werror; g++ ignores the annotations. See
// https://clang.llvm.org/docs/ThreadSafetyAnalysis.html.

#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "libtorchbeast/support/clock.h"

#if defined(__clang__)
#define TB_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define TB_THREAD_ANNOTATION(x)
#endif

#define CAPABILITY(x) TB_THREAD_ANNOTATION(capability(x))
#define SCOPED_CAPABILITY TB_THREAD_ANNOTATION(scoped_lockable)
#undef GUARDED_BY  // older Abseils, which gRPC includes, have one too
#define GUARDED_BY(x) TB_THREAD_ANNOTATION(guarded_by(x))
#define REQUIRES(...) TB_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define ACQUIRE(...) TB_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RELEASE(...) TB_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define EXCLUDES(...) TB_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))

namespace torchbeast {

// How often a long wait checks whether Python has received a signal that it must handle.
inline constexpr auto kPollInterval = std::chrono::milliseconds(100);

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Locks a Mutex for the current scope.
class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// A condition variable for Mutex. A wait releases the mutex and acquires it again before it
// returns; it may return without a reason.
class CondVar {
 public:
  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }
  // Returns false once the deadline has passed. Waits a second at most, see RunningTime.
  bool wait_until(Mutex& mutex, Clock::time_point deadline) REQUIRES(mutex) {
    const Clock::duration longest = std::chrono::seconds(1);
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait_for(lock, std::min(deadline - Clock::now(), longest));
    lock.release();
    return Clock::now() < deadline;
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace torchbeast
