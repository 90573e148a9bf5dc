// SPDX-License-Identifier: Apache-2.0
//
// The queue between actors and learner: what it joins, what it refuses at the door, how it ends.

#include "libtorchbeast/batching/rollout_queue.h"

#include <gtest/gtest.h>

#include "libtorchbeast/testing/threads.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using testing::array_of;
using testing::Background;
using testing::message_of;
using testing::same_bytes;
using testing::tuple;

QueueItem item(ArrayNest data, ArrayNest beside = {}) {
  return {.data = std::move(data), .info = std::move(beside)};
}

// int32 [1, 1]
Array one(std::int32_t value) { return array_of<std::int32_t>({1, 1}, {value}); }

// float32 zeros.
Array zeros(Shape shape) { return Array::zeros(DType::kFloat32, std::move(shape)); }

std::string error_of(RolloutQueue& queue, QueueItem refused) {
  return message_of<std::invalid_argument>([&] { queue.enqueue(std::move(refused)); });
}

TEST(RolloutQueueTest, ABatchIsJoinedAlongTheBatchDimensionInOrder) {
  RolloutQueue queue({});
  for (const std::int32_t i : {1, 2, 3}) queue.enqueue(item(tuple({one(i), one(10 * i)})));
  EXPECT_TRUE(
      same_bytes(queue.dequeue()->data, tuple({array_of<std::int32_t>({1, 3}, {1, 2, 3}),
                                               array_of<std::int32_t>({1, 3}, {10, 20, 30})})));
}

TEST(RolloutQueueTest, WhatTravelsBesideAnItemIsJoinedToo) {
  RolloutQueue queue({});
  queue.enqueue(item(one(1), tuple({one(5)})));
  queue.enqueue(item(one(2), tuple({array_of<std::int32_t>({1, 0}, {})})));
  queue.enqueue(item(one(3), tuple({array_of<std::int32_t>({1, 2}, {6, 7})})));
  const QueueItem batch = *queue.dequeue();
  EXPECT_EQ(batch.data.as_leaf().shape(), (Shape{1, 3}));
  EXPECT_TRUE(same_bytes(batch.info, tuple({array_of<std::int32_t>({1, 3}, {5, 6, 7})})));
}

TEST(RolloutQueueTest, TheMaximumCountsItemsAndNotTheirColumns) {
  RolloutQueue queue({.queue = {.maximum_batch_size = 2}});
  for (int i = 0; i < 3; ++i) queue.enqueue(item(zeros({4, 5})));
  EXPECT_EQ(queue.dequeue()->data.as_leaf().shape(), (Shape{4, 10}));
  EXPECT_EQ(queue.dequeue()->data.as_leaf().shape(), (Shape{4, 5}));
}

TEST(RolloutQueueTest, TheBatchDimensionCanBeAnother) {
  RolloutQueue queue({.batch_dim = 0});
  queue.enqueue(item(zeros({2, 3})));
  queue.enqueue(item(zeros({1, 3})));
  EXPECT_EQ(queue.dequeue()->data.as_leaf().shape(), (Shape{3, 3}));
}

// ---- What is refused -------------------------------------------------------------------------

TEST(RolloutQueueTest, ALeafWithoutABatchDimensionIsRefused) {
  RolloutQueue queue({});
  EXPECT_EQ(error_of(queue, item(tuple({zeros({1, 1}), zeros({3})}))),
            "Enqueued tensors must have more than batch_dim == 1 dimensions, but got 1");
}

TEST(RolloutQueueTest, AnItemWithoutALeafIsRefused) {
  RolloutQueue queue({});
  EXPECT_EQ(error_of(queue, item(tuple({tuple({})}))), "Cannot enqueue empty vector of tensors");
}

TEST(RolloutQueueTest, WhatIsWrongIsSaidBeforeThatTheQueueIsClosed) {
  RolloutQueue queue({});
  queue.close();
  EXPECT_EQ(error_of(queue, item(tuple({}))), "Cannot enqueue empty vector of tensors");
}

TEST(RolloutQueueTest, AnItemUnlikeTheFirstIsRefusedWithBothSides) {
  RolloutQueue queue({});
  queue.enqueue(item(zeros({2, 1, 3})));
  EXPECT_EQ(error_of(queue, item(zeros({2, 1, 4}))),
            "expected every item like the first, with float32[2, *, 3] at the root, but "
            "got float32[2, 1, 4]");
  EXPECT_EQ(error_of(queue, item(Array::zeros(DType::kUInt8, {2, 1, 3}))),
            "expected every item like the first, with float32[2, *, 3] at the root, but "
            "got uint8[2, 1, 3]");
}

TEST(RolloutQueueTest, AnItemOfAnotherStructureIsRefusedWithTheReason) {
  RolloutQueue queue({});
  queue.enqueue(item(tuple({one(1), one(2)})));
  EXPECT_EQ(error_of(queue, item(tuple({one(1)}))),
            "Expected vectors of same length but got 2 vs 1 at the root: vector of length 2 vs "
            "vector of length 1");
}

TEST(RolloutQueueTest, ARefusedItemSpoilsNobodysBatch) {
  RolloutQueue queue({});
  queue.enqueue(item(one(1), tuple({one(5)})));
  for (const QueueItem& bad :
       {item(zeros({1, 1}), tuple({one(5)})), item(one(9)), item(one(9), tuple({zeros({1, 1})})),
        item(one(9), tuple({array_of<std::int32_t>({}, {5})})), item(tuple({}), tuple({one(5)}))}) {
    EXPECT_THROW(queue.enqueue(bad), std::invalid_argument);
  }
  queue.enqueue(item(one(2), tuple({one(6)})));
  EXPECT_TRUE(same_bytes(queue.dequeue()->data, array_of<std::int32_t>({1, 2}, {1, 2})));
}

TEST(RolloutQueueTest, ARefusedFirstItemDoesNotDecideWhatIsRight) {
  RolloutQueue queue({});
  EXPECT_THROW(queue.enqueue(item(one(1), array_of<std::int32_t>({}, {5}))), std::invalid_argument);
  queue.enqueue(item(zeros({1, 1})));
  EXPECT_EQ(queue.size(), 1);
}

TEST(RolloutQueueTest, TheFirstItemsMemoryIsNotHeldByTheQueue) {
  RolloutQueue queue({});
  const Array array = zeros({1, 1});
  queue.enqueue(item(array));
  queue.dequeue();
  EXPECT_EQ(array.owner().use_count(), 1);
}

// ---- Endings ---------------------------------------------------------------------------------

TEST(RolloutQueueTest, AfterCloseBothSidesEnd) {
  RolloutQueue queue({});
  queue.enqueue(item(one(1)));
  queue.close();
  EXPECT_FALSE(queue.dequeue().has_value());
  EXPECT_EQ(message_of<ClosedBatchingQueue>([&] { queue.enqueue(item(one(2))); }),
            "Enqueue to closed queue");
}

TEST(RolloutQueueTest, CloseEndsALearnerThatWaitsAndAnActorThatWaits) {
  RolloutQueue queue({.queue = {.minimum_batch_size = 2}});
  RolloutQueue full({.queue = {.maximum_batch_size = 1, .maximum_queue_size = 1}});
  full.enqueue(item(one(0)));
  Background<bool> learner([&] { return queue.dequeue().has_value(); });
  Background<std::string> actor(
      [&] { return message_of<ClosedBatchingQueue>([&] { full.enqueue(item(one(1))); }); });
  queue.close();
  full.close();
  EXPECT_FALSE(learner.get());
  EXPECT_EQ(actor.get(), "Enqueue to closed queue");
}

}  // namespace
}  // namespace torchbeast
