// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/shortage.h"

#include <gtest/gtest.h>

namespace torchbeast {
namespace {

using namespace std::chrono_literals;

const Clock::time_point start = Clock::now();

TEST(ShortageTest, ItLastsFromTheFirstLossAlthoughOtherStreamsAreMissingNow) {
  ShortageWatch watch(60s);
  EXPECT_FALSE(watch.note(2, 2, start - 1s));
  EXPECT_EQ(watch.note(1, 2, start)->left, 60s);        // A is lost
  EXPECT_EQ(watch.note(0, 2, start + 50s)->left, 10s);  // B, too
  const auto found = watch.note(1, 2, start + 55s);     // A is back
  ASSERT_TRUE(found);
  EXPECT_EQ(found->connected, 1);
  EXPECT_EQ(found->needed, 2);
  EXPECT_EQ(found->left, 5s);
}

TEST(ShortageTest, ItEndsOnceEnoughAreConnectedAndTheNextOneBeginsAnew) {
  ShortageWatch watch(60s);
  EXPECT_TRUE(watch.note(1, 2, start));
  EXPECT_FALSE(watch.note(2, 2, start + 59s));
  EXPECT_EQ(watch.note(1, 2, start + 59s + 1ms)->left, 60s);
}

TEST(ShortageTest, ItEndsOnceFewerAreNeededToo) {
  ShortageWatch watch(60s);
  EXPECT_TRUE(watch.note(1, 2, start));
  EXPECT_FALSE(watch.note(1, 1, start + 59s));
}

TEST(ShortageTest, NothingIsLeftOfOneThatHasLastedAsLongAsItMayOrLonger) {
  ShortageWatch watch(60s);
  watch.note(0, 1, start);
  EXPECT_GT(watch.note(0, 1, start + 60s - 1ns)->left, 0s);
  EXPECT_EQ(watch.note(0, 1, start + 60s)->left, 0s);
  EXPECT_EQ(watch.note(0, 1, start + 100s)->left, 0s);
}

}  // namespace
}  // namespace torchbeast
