// SPDX-License-Identifier: Apache-2.0
// Measures how streams spend their time.

#pragma once

#include "libtorchbeast/support/sync.h"

namespace torchbeast {

enum class Stage { kNone, kEnvironment, kInference, kQueueing };

// The time that one or several streams spent in each stage.
struct StageTimes {
  Clock::duration environment{};  // stepping, and waiting for a lost server
  Clock::duration inference{};    // waiting for actions
  Clock::duration queueing{};     // waiting for room in the learner queue

  StageTimes& operator+=(const StageTimes& other) {
    environment += other.environment;
    inference += other.inference;
    queueing += other.queueing;
    return *this;
  }
};

// Measures the time of one stream, which is in exactly one stage at any time.
//
// Thread safety: the stream's thread calls enter(); any thread may call times(). Each clock has its
// own lock, so streams never wait for each other.
class StageClock {
 public:
  // Ends the current stage and begins another.
  void enter(Stage stage) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const auto now = Clock::now();
    add(now - since_, &spent_);
    stage_ = stage;
    since_ = now;
  }

  // Returns the times so far. They include the current stage, so a wait is visible before it ends.
  StageTimes times() const EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    StageTimes times = spent_;
    add(Clock::now() - since_, &times);
    return times;
  }

 private:
  void add(Clock::duration duration, StageTimes* times) const REQUIRES(mutex_) {
    if (stage_ == Stage::kEnvironment) times->environment += duration;
    if (stage_ == Stage::kInference) times->inference += duration;
    if (stage_ == Stage::kQueueing) times->queueing += duration;
  }

  mutable Mutex mutex_;
  Stage stage_ GUARDED_BY(mutex_) = Stage::kNone;
  Clock::time_point since_ GUARDED_BY(mutex_);
  StageTimes spent_ GUARDED_BY(mutex_);
};

}  // namespace torchbeast
