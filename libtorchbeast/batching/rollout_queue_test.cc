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
using testing::values_of;

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

// ---- Spare columns ---------------------------------------------------------------------------

// Overwrites every byte of a batch, its spare columns included.
void overwrite(QueueItem& batch, int byte) {
  for (ArrayNest* part : {&batch.data, &batch.info}) {
    nest::for_each(
        [byte](const Array& leaf) {
          Array writable = leaf;
          std::memset(writable.data(), byte, writable.num_bytes());
        },
        *part);
  }
}

// Returns the first `columns` columns of every leaf.
ArrayNest first(std::int64_t columns, const ArrayNest& nest) { return narrow(nest, 1, 0, columns); }

// Makes a rollout of two columns, large enough that its memory is recycled: (frames, last), all of
// which are `value`, and info with a number for each column.
QueueItem rollout(std::int32_t value) {
  return item(tuple({Array::filled<std::int32_t>({5, 2, 600}, value),
                     Array::filled<std::int32_t>({1, 2}, value)}),
              ArrayNest(ArrayNest::Map{
                  {"column", array_of<std::int32_t>({1, 2}, {2 * value, 2 * value + 1})}}));
}

// A queue whose batches are two such rollouts.
RolloutQueueOptions pairs_with_spare(std::int64_t spare_columns) {
  return {.spare_columns = spare_columns,
          .queue = {.minimum_batch_size = 2, .maximum_batch_size = 2}};
}

// Returns the batch of rollouts a and b.
QueueItem pair(RolloutQueue& queue, std::int32_t a, std::int32_t b) {
  queue.enqueue(rollout(a));
  queue.enqueue(rollout(b));
  return *queue.dequeue();
}

TEST(RolloutQueueTest, EveryLeafHasSpareColumnsAfterThoseOfTheItems) {
  RolloutQueue queue(pairs_with_spare(3));
  const QueueItem batch = pair(queue, 1, 2);
  EXPECT_EQ(batch.data.as_vector()[0].as_leaf().shape(), (Shape{5, 7, 600}));
  EXPECT_EQ(batch.data.as_vector()[1].as_leaf().shape(), (Shape{1, 7}));
  EXPECT_EQ(batch.info.as_map().at("column").as_leaf().shape(), (Shape{1, 7}));
}

TEST(RolloutQueueTest, TheColumnsOfTheItemsAreThoseOfABatchWithoutSpareColumns) {
  for (const std::int64_t spare : {1, 2, 28}) {
    for (const std::int64_t items : {1, 2, 5}) {
      RolloutQueue with({.spare_columns = spare}), without({});
      for (std::int32_t i = 0; i < items; ++i) {
        with.enqueue(rollout(i));
        without.enqueue(rollout(i));
      }
      const QueueItem found = *with.dequeue(), expected = *without.dequeue();
      EXPECT_TRUE(same_bytes(first(2 * items, found.data), expected.data)) << items << spare;
      EXPECT_TRUE(same_bytes(first(2 * items, found.info), expected.info)) << items << spare;
    }
  }
}

TEST(RolloutQueueTest, WritingToABatchWithSpareColumnsChangesNoItem) {
  RolloutQueue queue({.spare_columns = 1});
  const QueueItem kept = rollout(3);  // shares its bytes with the enqueued one
  queue.enqueue(kept);
  QueueItem batch = *queue.dequeue();
  overwrite(batch, 0xff);
  EXPECT_TRUE(same_bytes(kept.data, rollout(3).data));
}

TEST(RolloutQueueTest, WhatIsWrittenToABatchStaysThereAndReachesNoOther) {
  RolloutQueue queue(pairs_with_spare(3));
  QueueItem early = pair(queue, 1, 2);
  overwrite(early, 0x55);
  QueueItem late = pair(queue, 3, 4);
  RolloutQueue plain(pairs_with_spare(0));
  EXPECT_TRUE(same_bytes(first(4, late.data), pair(plain, 3, 4).data));
  overwrite(late, 0x66);
  int compared = 0;
  nest::for_each(
      [&](const Array& leaf) {
        for (std::size_t i = 0; i < leaf.num_bytes(); ++i, ++compared) {
          ASSERT_EQ(std::to_integer<int>(leaf.data()[i]), 0x55);
        }
      },
      early.data);
  EXPECT_EQ(compared, (5 * 600 + 1) * 7 * 4);
}

TEST(RolloutQueueTest, TheNextBatchIsWholeInMemoryThatAnotherHasUsed) {
  RolloutQueue queue(pairs_with_spare(3)), plain(pairs_with_spare(0));
  const ArrayNest expected = pair(plain, 1, 2).data;
  const std::byte* before = nullptr;
  for (int i = 0; i < 3; ++i) {
    QueueItem batch = pair(queue, 1, 2);
    EXPECT_TRUE(same_bytes(first(4, batch.data), expected)) << i;
    const std::byte* const now = batch.data.as_vector()[0].as_leaf().data();
    if (i > 0) {
      EXPECT_EQ(now, before) << "its memory is recycled";
    }
    before = now;
    overwrite(batch, 0x77);
  }
}

TEST(RolloutQueueTest, BatchesWithSpareColumnsUseTheSameMemoryAgainAndAgain) {
  RolloutQueue queue(pairs_with_spare(28));
  pair(queue, 1, 2);
  const std::size_t idle = BufferPool::instance().idle_bytes();
  for (std::int32_t i = 0; i < 100; ++i) pair(queue, i, i);
  EXPECT_EQ(BufferPool::instance().idle_bytes(), idle);
}

TEST(RolloutQueueTest, QueuesWithOtherSpareColumnsDoNotMix) {
  RolloutQueue few(pairs_with_spare(1)), many(pairs_with_spare(28)), none(pairs_with_spare(0));
  const ArrayNest expected = pair(none, 1, 2).data;
  for (int i = 0; i < 3; ++i) {
    QueueItem a = pair(few, 1, 2), b = pair(many, 1, 2), c = pair(none, 1, 2);
    EXPECT_EQ(a.data.as_vector()[1].as_leaf().size(1), 5);
    EXPECT_EQ(b.data.as_vector()[1].as_leaf().size(1), 32);
    EXPECT_TRUE(same_bytes(c.data, expected));
    overwrite(b, 0x11);
    EXPECT_TRUE(same_bytes(first(4, a.data), expected));
    EXPECT_TRUE(same_bytes(c.data, expected));
    overwrite(a, 0x22);
    overwrite(c, 0x33);
  }
}

TEST(RolloutQueueTest, ConsumersWriteTheirSpareColumnsWithoutMeetingEachOther) {
  RolloutQueue queue(
      {.spare_columns = 3,
       .queue = {.minimum_batch_size = 2, .maximum_batch_size = 2, .maximum_queue_size = 4}});
  constexpr std::int32_t kBatches = 40;
  const auto consume = [&](int byte) {
    int mistakes = 0;
    std::optional<QueueItem> held;  // while the next one is joined
    for (std::int32_t i = 0; i < kBatches; ++i) {
      QueueItem batch = *queue.dequeue();
      const std::vector<std::int32_t> last =
          values_of<std::int32_t>(batch.data.as_vector()[1].as_leaf());
      const Array& frames = batch.data.as_vector()[0].as_leaf();
      for (std::int64_t row = 0; row < 5; ++row) {
        for (std::int64_t column = 0; column < 4; ++column) {
          mistakes += frames.as<std::int32_t>()[(row * 7 + column) * 600 + 599] !=
                      last.at(static_cast<std::size_t>(column));
        }
      }
      overwrite(batch, byte);
      if (held) mistakes += std::to_integer<int>(*nest::front(held->data).data()) != byte;
      held = std::move(batch);
    }
    return mistakes;
  };
  const auto produce = [&] {
    for (std::int32_t i = 0; i < 2 * kBatches; ++i) queue.enqueue(rollout(i));
    return true;
  };
  Background<int> consumer([&] { return consume(0x11); });
  Background<int> other_consumer([&] { return consume(0x22); });
  Background<bool> producer(produce), other_producer(produce);
  EXPECT_EQ(consumer.get() + other_consumer.get(), 0);
  EXPECT_TRUE(producer.get() && other_producer.get());
}

TEST(RolloutQueueTest, ABatchOfFewerItemsHasAsManySpareColumns) {
  RolloutQueue queue({.spare_columns = 3,
                      .queue = {.minimum_batch_size = 2, .timeout = std::chrono::milliseconds(0)}});
  queue.enqueue(rollout(1));
  EXPECT_EQ(queue.dequeue()->data.as_vector()[1].as_leaf().shape(), (Shape{1, 5}));
}

TEST(RolloutQueueTest, AnImpossibleNumberOfSpareColumnsIsRefused) {
  for (const std::int64_t spare : {std::int64_t{-1}, std::int64_t{1} << 31}) {
    EXPECT_EQ(
        message_of<std::invalid_argument>([&] { RolloutQueue queue({.spare_columns = spare}); }),
        "spare_columns must be between 0 and 2147483647, got " + std::to_string(spare));
  }
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
