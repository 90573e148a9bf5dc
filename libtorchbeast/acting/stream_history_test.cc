// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/stream_history.h"

#include <gtest/gtest.h>

namespace torchbeast {
namespace {

using namespace std::chrono_literals;
using Next = Verdict::Next;

StreamHistory history(RetryOptions options = {}) { return {options, 1}; }

// A connection that comes up and completes this many rollouts.
void plays(StreamHistory* history, int rollouts) {
  history->came_up();
  for (int i = 0; i < rollouts; ++i) history->completed_rollout();
}

TEST(StreamHistoryTest, AFailureBeforeAnyRolloutEndsTheRun) {
  auto never_up = history();
  EXPECT_EQ(never_up.failed().next, Next::kEndRun) << "the environment cannot be made";
  auto first_steps = history();
  plays(&first_steps, 0);
  EXPECT_EQ(first_steps.failed().next, Next::kEndRun);
}

TEST(StreamHistoryTest, AFailureAfterARolloutIsFollowedByAnotherConnection) {
  auto stream = history();
  plays(&stream, 1);
  EXPECT_EQ(stream.failed().next, Next::kConnectAgain);
  plays(&stream, 0);
  EXPECT_EQ(stream.failed().next, Next::kConnectAgain) << "it completed a rollout once";
}

TEST(StreamHistoryTest, FailuresWithinTheWindowRetireAStreamThoughItCompletesRollouts) {
  auto stream = history({.failures = 5});
  for (int failure = 1; failure < 5; ++failure) {
    plays(&stream, 3);
    const Verdict verdict = stream.failed();
    EXPECT_EQ(verdict.next, Next::kConnectAgain);
    EXPECT_EQ(verdict.failures, failure);
  }
  plays(&stream, 3);
  EXPECT_EQ(stream.failed().next, Next::kRetire);
}

TEST(StreamHistoryTest, FailuresOutsideOfTheWindowDoNotCount) {
  auto stream = history({.failures = 2, .failure_window = 0ms});
  for (int i = 0; i < 20; ++i) {
    plays(&stream, 1);
    EXPECT_EQ(stream.failed().next, Next::kConnectAgain);
  }
}

TEST(StreamHistoryTest, ConnectionsWithoutARolloutEndTheRunOrRetireAStreamThatHadOne) {
  for (const int before : {0, 1}) {
    auto stream = history({.fruitless_connections = 3});
    if (before > 0) {
      plays(&stream, before);
      EXPECT_EQ(stream.lost().next, Next::kConnectAgain);
    }
    for (int i = 0; i < 2; ++i) {
      plays(&stream, 0);
      EXPECT_EQ(stream.lost().next, Next::kConnectAgain);
    }
    plays(&stream, 0);
    const Verdict last = stream.lost();
    EXPECT_EQ(last.next, before > 0 ? Next::kRetire : Next::kEndRun);
    EXPECT_NE(last.why.find("connection 3 in a row"), std::string::npos) << last.why;
  }
}

TEST(StreamHistoryTest, ARareFailureWithoutARolloutInBetweenRetiresAStream) {
  auto stream = history({.fruitless_connections = 3, .failure_window = 0ms});
  plays(&stream, 1);
  stream.lost();
  EXPECT_EQ(stream.failed().next, Next::kConnectAgain);
  EXPECT_EQ(stream.failed().next, Next::kConnectAgain);
  EXPECT_EQ(stream.failed().next, Next::kRetire) << "a constructor that takes minutes and fails";
}

TEST(StreamHistoryTest, AServerThatIsAwayIsTriedForEver) {
  auto stream = history({.connect_timeout = 0ms});
  plays(&stream, 0);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(stream.lost().next, Next::kConnectAgain);
}

TEST(StreamHistoryTest, AServerThatIsNeverThereEndsTheRunAfterTheConnectTimeout) {
  EXPECT_EQ(history({.connect_timeout = 1h}).lost().next, Next::kConnectAgain);
  const Verdict verdict = history({.connect_timeout = 0ms}).lost();
  EXPECT_EQ(verdict.next, Next::kEndRun);
  EXPECT_EQ(verdict.why, "") << "a single connection needs no count";
}

TEST(StreamHistoryTest, TheNumbersOfRolloutsLeaveOneOutAfterAConnectionWithRollouts) {
  auto stream = history({.failures = 100});
  EXPECT_EQ(stream.first_rollout(), 0);
  plays(&stream, 3);
  stream.lost();
  EXPECT_EQ(stream.first_rollout(), 4) << "0, 1 and 2 were completed, 3 was not";
  plays(&stream, 0);
  stream.failed();
  EXPECT_EQ(stream.first_rollout(), 4) << "4 was not completed, so nobody has seen it";
  plays(&stream, 1);
  stream.failed();
  EXPECT_EQ(stream.first_rollout(), 6);
  EXPECT_EQ(stream.connection(), 3u);
}

TEST(StreamHistoryTest, PausesGrowUntilARolloutIsCompleted) {
  auto stream = history({.fruitless_connections = 100, .failures = 100});
  plays(&stream, 1);
  for (int i = 0; i < 8; ++i) stream.failed();
  EXPECT_GE(stream.pause(), 2500ms);
  EXPECT_LE(stream.pause(), 5000ms);
  plays(&stream, 1);
  stream.failed();
  EXPECT_LE(stream.pause(), 100ms);
}

}  // namespace
}  // namespace torchbeast
