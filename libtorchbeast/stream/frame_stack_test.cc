// SPDX-License-Identifier: Apache-2.0
//
// Stacks are rebuilt as the frame-stacking wrappers would have built them.

#include "libtorchbeast/stream/frame_stack.h"

#include <gtest/gtest.h>

#include <deque>
#include <random>

#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using testing::array_of;
using testing::message_of;
using testing::same_bytes;
using testing::tuple;
using testing::values_of;

using Values = std::vector<std::int32_t>;

Array frames(std::initializer_list<std::int32_t> values) {
  return array_of({static_cast<std::int64_t>(values.size()), 1}, values);
}

Array starts(std::initializer_list<bool> values) {
  return array_of({static_cast<std::int64_t>(values.size())}, values);
}

Values pushed(FrameStack& stack, const Array& frame, const Array& start) {
  return values_of<std::int32_t>(stack.push(ArrayNest(frame), start).as_leaf());
}

TEST(FrameStackTest, TheFirstFrameOfAnEpisodeFillsTheStack) {
  FrameStack stack(3);
  EXPECT_EQ(pushed(stack, frames({1}), starts({true})), (Values{1, 1, 1}));
  EXPECT_EQ(pushed(stack, frames({2}), starts({false})), (Values{1, 1, 2}));
  EXPECT_EQ(pushed(stack, frames({3}), starts({true})), (Values{3, 3, 3}));
}

TEST(FrameStackTest, TheOldestFrameComesFirstAndLeavesFirst) {
  FrameStack stack(2);
  pushed(stack, frames({1}), starts({true}));
  pushed(stack, frames({2}), starts({false}));
  EXPECT_EQ(pushed(stack, frames({3}), starts({false})), (Values{2, 3}));
}

TEST(FrameStackTest, EnvironmentsDoNotMix) {
  FrameStack stack(2);
  pushed(stack, frames({1, 10}), starts({true, true}));
  EXPECT_EQ(pushed(stack, frames({2, 20}), starts({false, true})), (Values{1, 2, 20, 20}));
  EXPECT_EQ(pushed(stack, frames({3, 30}), starts({true, false})), (Values{3, 3, 20, 30}));
}

TEST(FrameStackTest, ManyEnvironmentsEqualOneQueueEach) {
  constexpr std::int64_t kEnvs = 5, kFrames = 4, kChannels = 2;
  FrameStack stack(kFrames);
  std::vector<std::deque<std::int32_t>> expected(kEnvs);
  std::mt19937 random(1);
  for (int step = 0; step < 50; ++step) {
    Array frame(DType::kInt32, {kEnvs, kChannels});
    Array start(DType::kBool, {kEnvs});
    Values all;
    for (std::int64_t e = 0; e < kEnvs; ++e) {
      start.as<bool>()[e] = step == 0 || random() % 4 == 0;
      std::deque<std::int32_t>& queue = expected[static_cast<std::size_t>(e)];
      if (start.as<bool>()[e]) queue.clear();
      do {
        for (std::int64_t c = 0; c < kChannels; ++c) {
          const auto value = static_cast<std::int32_t>(step * 100 + e * 10 + c);
          frame.as<std::int32_t>()[e * kChannels + c] = value;
          queue.push_back(value);
        }
      } while (queue.size() < kFrames * kChannels);
      while (queue.size() > kFrames * kChannels) queue.pop_front();
      all.insert(all.end(), queue.begin(), queue.end());
    }
    ASSERT_EQ(pushed(stack, frame, start), all) << "at step " << step;
  }
}

TEST(FrameStackTest, WhatWasReturnedIsNeverWrittenAgain) {
  FrameStack stack(2);
  const ArrayNest first = stack.push(ArrayNest(frames({1})), starts({true}));
  const Array before = first.as_leaf().clone();
  for (int i = 0; i < 4; ++i) stack.push(ArrayNest(frames({9})), starts({i % 2 == 0}));
  EXPECT_TRUE(same_bytes(first.as_leaf(), before));
}

TEST(FrameStackTest, EveryLeafOfANestIsStacked) {
  FrameStack stack(2);
  const ArrayNest nest = tuple({frames({1}), frames({5})});
  EXPECT_TRUE(same_bytes(
      stack.push(nest, starts({true})),
      tuple({array_of<std::int32_t>({1, 2}, {1, 1}), array_of<std::int32_t>({1, 2}, {5, 5})})));
}

TEST(FrameStackTest, AStackOfOneIsTheFrameItselfWithoutACopy) {
  FrameStack stack(1);
  const Array frame = frames({1});
  EXPECT_EQ(stack.push(ArrayNest(frame), starts({false})).as_leaf().data(), frame.data());
  EXPECT_EQ(stack.with_finals(ArrayNest(frame), starts({true})).as_leaf().data(), frame.data());
}

TEST(FrameStackTest, AFinalFrameEndsTheStackOfItsOwnEpisode) {
  FrameStack stack(3);
  pushed(stack, frames({1, 10, 100}), starts({true, true, true}));
  pushed(stack, frames({2, 20, 200}), starts({false, false, false}));
  const ArrayNest finals =
      stack.with_finals(ArrayNest(frames({3, 300})), starts({true, false, true}));
  EXPECT_TRUE(
      same_bytes(finals.as_leaf(), array_of<std::int32_t>({2, 3}, {1, 2, 3, 100, 200, 300})));
  EXPECT_EQ(pushed(stack, frames({7, 30, 70}), starts({true, false, true})),
            (Values{7, 7, 7, 10, 20, 30, 70, 70, 70}));
}

TEST(FrameStackTest, AFinalFrameBeforeAnyOtherIsRefused) {
  FrameStack stack(2);
  EXPECT_EQ(message_of<std::invalid_argument>(
                [&] { stack.with_finals(ArrayNest(frames({1})), starts({true})); }),
            "a final observation came before the first observation of its episode");
}

TEST(FrameStackTest, FramesWithoutAChannelDimensionAreRefused) {
  FrameStack stack(2);
  EXPECT_EQ(message_of<std::invalid_argument>(
                [&] { stack.push(ArrayNest(array_of<std::int32_t>({1}, {1})), starts({true})); }),
            "frames to be stacked need a channel dimension, got shape [1]");
}

}  // namespace
}  // namespace torchbeast
