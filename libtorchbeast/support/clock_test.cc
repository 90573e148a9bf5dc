// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/support/clock.h"

#include <gtest/gtest.h>

#include "libtorchbeast/support/sync.h"

namespace torchbeast {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

TEST(RunningTime, PassesLikeTheOtherClockWhileItIsRead) {
  RunningTime time(seconds(100));
  const auto before = time.note(seconds(100));
  for (int second = 101; second <= 700; ++second) time.note(seconds(second));
  EXPECT_EQ(time.note(seconds(700)) - before, minutes(10));
}

TEST(RunningTime, DoesNotCountATimeInWhichNobodyReadIt) {
  RunningTime time(seconds(100));
  const auto before = time.note(seconds(103));
  EXPECT_EQ(time.note(seconds(103) + minutes(11)) - before, RunningTime::kLongest);
}

TEST(CondVar, ReadsTheClockDuringALongWait) {
  Mutex mutex;
  CondVar never;
  MutexLock lock(mutex);
  EXPECT_TRUE(never.wait_until(mutex, Clock::now() + minutes(10)));
}

TEST(CondVar, SaysWhenTheDeadlineHasPassed) {
  Mutex mutex;
  CondVar never;
  MutexLock lock(mutex);
  const auto deadline = Clock::now() + milliseconds(10);
  while (never.wait_until(mutex, deadline)) continue;
  EXPECT_GE(Clock::now(), deadline);
}

}  // namespace
}  // namespace torchbeast
