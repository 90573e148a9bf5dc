// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/support/clock.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <thread>
#include <utility>

#include "libtorchbeast/support/sync.h"

namespace torchbeast {
namespace {

using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;

TEST(RunningTime, PassesLikeTheOtherClockWhileItIsRead) {
  auto now = milliseconds(100'123);
  const auto other = [&] { return now; };
  RunningTime time(now);
  const auto before = time.read(other);
  for (; now < milliseconds(700'123); now += milliseconds(250)) time.read(other);
  EXPECT_EQ(time.read(other) - before, minutes(10));
}

TEST(RunningTime, DoesNotCountATimeInWhichNobodyReadIt) {
  auto now = seconds(103);
  const auto other = [&] { return now; };
  RunningTime time(seconds(100));
  const auto before = time.read(other);
  now += minutes(11);
  EXPECT_EQ(time.read(other) - before, RunningTime::kLongest);
  now += seconds(1);
  EXPECT_EQ(time.read(other) - before, RunningTime::kLongest + seconds(1));
}

TEST(RunningTime, CountsAPauseOnceAlthoughTwoThreadsFindIt) {
  auto now = seconds(100);
  RunningTime time(now);
  const auto before = time.read([&] { return now; });
  bool is_first = true;
  const auto after_another = time.read([&] {
    now = seconds(1000);
    if (std::exchange(is_first, false)) time.read([&] { return now; });
    return now;
  });
  EXPECT_EQ(after_another - before, RunningTime::kLongest);
}

TEST(Clock, CanBeReadInTheChildOfAForkWhateverOtherThreadsDid) {
  std::atomic<bool> ended = false;
  std::thread reader([&] {
    while (!ended) Clock::now();
  });
  for (int i = 0; i < 100; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(5);  // ends a child that hangs
      Clock::now();
      _exit(0);
    }
    int status;
    EXPECT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    if (status != 0) break;
  }
  ended = true;
  reader.join();
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
