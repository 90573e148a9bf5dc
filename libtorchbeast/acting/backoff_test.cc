// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/backoff.h"

#include <gtest/gtest.h>

#include <set>

namespace torchbeast {
namespace {

using namespace std::chrono_literals;

TEST(BackoffTest, PausesDoubleUpToTheLongestAndAreShortenedByHalfAtMost) {
  Backoff backoff(100ms, 5000ms, 1);
  for (const auto whole : {100ms, 200ms, 400ms, 800ms, 1600ms, 3200ms, 5000ms, 5000ms}) {
    const auto pause = backoff.next();
    EXPECT_LE(pause, whole);
    EXPECT_GE(pause, whole / 2);
  }
  backoff.restart();
  EXPECT_LE(backoff.next(), 100ms);
}

TEST(BackoffTest, StreamsThatAreLostTogetherComeBackApart) {
  std::set<std::chrono::milliseconds> pauses;
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    Backoff backoff(5000ms, 5000ms, seed);
    pauses.insert(backoff.next());
  }
  EXPECT_GT(pauses.size(), 90u);
  EXPECT_LT(*pauses.begin(), 2700ms);
  EXPECT_GT(*pauses.rbegin(), 4800ms);
}

}  // namespace
}  // namespace torchbeast
