// SPDX-License-Identifier: Apache-2.0
// What streams spend their time on.

#pragma once

#include "libtorchbeast/support/sync.h"

namespace torchbeast {

enum class Stage { kNone, kEnvironment, kInference, kQueueing };

// Time of one or more streams.
struct StageTimes {
  Clock::duration environment{};  // stepping, and waiting for a server that is away
  Clock::duration inference{};    // from the question for actions to the answer
  Clock::duration queueing{};     // waiting for room in the learner queue

  StageTimes& operator+=(const StageTimes& other) {
    environment += other.environment;
    inference += other.inference;
    queueing += other.queueing;
    return *this;
  }
};

// One stream's time. The stream is in one stage at every moment, so that nothing is left out.
//
// Thread safety: enter() from the stream's thread, times() from any. The lock is this stream's own:
// streams never wait for each other here.
class StageClock {
 public:
  void enter(Stage stage) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    const auto now = Clock::now();
    add(now - since_, &spent_);
    stage_ = stage;
    since_ = now;
  }

  // The stage that is under way included: a wait without an end shows while it lasts.
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
