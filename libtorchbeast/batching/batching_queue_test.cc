// SPDX-License-Identifier: Apache-2.0
//
// The promises of batching_queue.h, most of all how it ends.

#include "libtorchbeast/batching/batching_queue.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <array>
#include <atomic>
#include <memory>
#include <numeric>

#include "libtorchbeast/testing/no_memory.h"
#include "libtorchbeast/testing/threads.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using namespace std::chrono_literals;
using testing::Background;
using testing::message_of;
using testing::Notification;
using testing::until;

using Queue = BatchingQueue<int>;
using Items = std::vector<int>;
using MaybeItems = std::optional<Items>;

MaybeItems dequeue(Queue& queue) { return queue.dequeue_many(); }

std::string options_error(const BatchingQueueOptions& options) {
  return message_of<std::invalid_argument>([&] { Queue queue(options); });
}

void wait_for_consumers(const Queue& queue, int count) {
  until([&] { return queue.waiting_consumers() == count; }, "a consumer waiting");
}

void wait_for_producers(const Queue& queue, int count) {
  until([&] { return queue.waiting_producers() == count; }, "a producer waiting");
}

TEST(BatchingQueueTest, ClosingNeedsNoMemory) {
  Queue queue({});
  for (int i = 0; i < 1000; ++i) queue.enqueue(i);  // more than a deque's first block
  bool closed = false;
  {
    const testing::NoMemory scope;
    closed = queue.try_close();
  }
  EXPECT_TRUE(closed);
  EXPECT_EQ(queue.size(), 0);
}

TEST(BatchingQueueTest, AConsumerThatGetsNoMemoryLeavesItsItemsToAnother) {
  Queue queue({});
  Background<bool> fails([&] {
    const testing::NoMemory scope;
    try {
      return queue.dequeue_many().has_value();
    } catch (const std::bad_alloc&) {
      return false;
    }
  });
  wait_for_consumers(queue, 1);
  Background<MaybeItems> takes([&] { return dequeue(queue); });
  wait_for_consumers(queue, 2);
  queue.enqueue(1);
  EXPECT_EQ(takes.get(), Items{1});
  queue.enqueue(2);  // if the second was faster
  EXPECT_FALSE(fails.get());
}

TEST(BatchingQueueTest, SizesAreCheckedInTheStatedOrder) {
  EXPECT_EQ(options_error({.minimum_batch_size = 0, .maximum_batch_size = -1}),
            "Min batch size must be >= 1");
  EXPECT_EQ(
      options_error({.minimum_batch_size = 3, .maximum_batch_size = 2, .maximum_queue_size = 1}),
      "Max batch size must be >= min batch size");
  EXPECT_EQ(options_error({.maximum_batch_size = 2, .maximum_queue_size = 1}),
            "Max queue size must be >= max batch size");
  EXPECT_EQ(options_error({.maximum_batch_size = 2, .maximum_queue_size = 2}),
            "nothing was thrown");
}

TEST(BatchingQueueTest, ItemsComeInTheOrderTheyWentIn) {
  Queue queue({});
  for (int i = 0; i < 5; ++i) queue.enqueue(i);
  EXPECT_EQ(queue.size(), 5);
  EXPECT_EQ(dequeue(queue), (Items{0, 1, 2, 3, 4}));
  EXPECT_EQ(queue.size(), 0);
}

TEST(BatchingQueueTest, ABatchHasNoMoreThanTheMaximum) {
  Queue queue({.maximum_batch_size = 2});
  for (int i = 0; i < 3; ++i) queue.enqueue(i);
  EXPECT_EQ(dequeue(queue), (Items{0, 1}));
  EXPECT_EQ(dequeue(queue), (Items{2}));
}

TEST(BatchingQueueTest, AConsumerWaitsForTheMinimum) {
  Queue queue({.minimum_batch_size = 2});
  Background<MaybeItems> consumer([&] { return dequeue(queue); });
  wait_for_consumers(queue, 1);
  queue.enqueue(1);
  EXPECT_EQ(queue.size(), 1);
  queue.enqueue(2);
  EXPECT_EQ(consumer.get(), (Items{1, 2}));
}

TEST(BatchingQueueTest, ATimeoutGivesLessThanTheMinimumButNotBeforeItHasPassed) {
  Queue queue({.minimum_batch_size = 2, .timeout = 30ms});
  queue.enqueue(1);
  const auto start = Clock::now();
  EXPECT_EQ(dequeue(queue), (Items{1}));
  EXPECT_GE(Clock::now() - start, 30ms);
}

TEST(BatchingQueueTest, ATimeoutGivesNoEmptyBatch) {
  Queue queue({.timeout = 0ms});
  Background<MaybeItems> consumer([&] { return dequeue(queue); });
  wait_for_consumers(queue, 1);
  queue.enqueue(7);
  EXPECT_EQ(consumer.get(), (Items{7}));
}

TEST(BatchingQueueTest, ConsumersWhoseTimeHasPassedTakeItemsOneByOne) {
  Queue queue({.minimum_batch_size = 2, .timeout = 1ms});
  Background<MaybeItems> first([&] { return dequeue(queue); });
  Background<MaybeItems> second([&] { return dequeue(queue); });
  wait_for_consumers(queue, 2);
  queue.enqueue(1);
  until([&] { return queue.size() == 0; }, "a consumer taking the item");
  queue.enqueue(2);
  EXPECT_EQ(first.get()->size() + second.get()->size(), 2u);
}

TEST(BatchingQueueTest, AnEnqueueToAFullQueueGoesOnWhenThereIsRoom) {
  Queue queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  queue.enqueue(1);
  Background<void> producer([&] { queue.enqueue(2); });
  wait_for_producers(queue, 1);
  EXPECT_EQ(dequeue(queue), (Items{1}));
  producer.get();
  EXPECT_EQ(dequeue(queue), (Items{2}));
}

TEST(BatchingQueueTest, ADequeueWakesNoMoreProducersThanItHasMadeRoomFor) {
  constexpr int kProducers = 64;
  Queue queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  queue.enqueue(0);
  std::atomic<long> switches = 0;
  std::vector<Background<void>> producers;
  for (int i = 1; i <= kProducers; ++i) {
    producers.emplace_back([&queue, &switches, i] {
      queue.enqueue(i);
      rusage usage{};
      ::getrusage(RUSAGE_THREAD, &usage);
      switches += usage.ru_nvcsw;
    });
  }
  for (int waiting = kProducers; waiting > 0; --waiting) {
    until([&] { return queue.waiting_producers() == waiting && queue.size() == 1; },
          "a full queue");
    dequeue(queue);
  }
  for (auto& producer : producers) producer.get();
  EXPECT_LT(switches, 10 * kProducers) << "if all wake each time, they wait 2,000 times";
}

TEST(BatchingQueueTest, AProducerThatGetsNoMemoryLeavesItsRoomToAnother) {
  struct Large {
    std::array<char, 1000> bytes;  // so that a deque allocates for each
  };
  BatchingQueue<Large> queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  queue.enqueue({});
  Background<bool> fails([&] {
    const testing::NoMemory scope;
    try {
      queue.enqueue({});
    } catch (const std::bad_alloc&) {
      return true;
    }
    return false;
  });
  until([&] { return queue.waiting_producers() == 1; }, "the first producer");
  Background<void> another([&] { queue.enqueue({}); });
  until([&] { return queue.waiting_producers() == 2; }, "the second producer");
  queue.dequeue_many();
  another.get();
  queue.dequeue_many();  // in case that the other one was woken first
  EXPECT_TRUE(fails.get());
}

TEST(BatchingQueueTest, AQueueNeverHoldsMoreThanItsCapacity) {
  Queue queue({.maximum_batch_size = 1, .maximum_queue_size = 2});
  Background<void> producer([&] {
    for (int i = 0; i < 200; ++i) queue.enqueue(i);
  });
  for (int i = 0; i < 200; ++i) {
    EXPECT_LE(queue.size(), 2);
    EXPECT_EQ(dequeue(queue), (Items{i}));
  }
  producer.get();
}

// ---- A moment's wait -------------------------------------------------------------------------

constexpr std::chrono::microseconds kForEver = std::chrono::hours(1);

// Announced producers.
std::vector<std::unique_ptr<Queue::Regular>> regulars(Queue& queue, int count) {
  std::vector<std::unique_ptr<Queue::Regular>> announced;
  for (int i = 0; i < count; ++i) announced.push_back(std::make_unique<Queue::Regular>(&queue));
  return announced;
}

void wait_for_gathering(const Queue& queue) {
  until([&] { return queue.is_gathering(); }, "a consumer waiting for more");
}

TEST(BatchingQueueTest, ABatchIsHeldBackForHalfOfTheRegularProducers) {
  Queue queue({.moment = kForEver});
  const auto announced = regulars(queue, 5);
  Background<MaybeItems> consumer([&] { return dequeue(queue); });
  for (int i = 1; i <= 3; ++i) {
    queue.enqueue(i);
    if (i < 3) wait_for_gathering(queue);
  }
  EXPECT_EQ(consumer.get(), (Items{1, 2, 3}));
}

TEST(BatchingQueueTest, OneOrTwoRegularProducersAreNotWaitedFor) {
  Queue queue({.moment = kForEver});
  for (int count = 0; count <= 2; ++count) {
    const auto announced = regulars(queue, count);
    queue.enqueue(count);
    EXPECT_EQ(dequeue(queue), (Items{count}));
  }
}

TEST(BatchingQueueTest, ABatchIsHeldBackForAMomentOnly) {
  Queue queue({.moment = 1us});
  const auto announced = regulars(queue, 10);
  queue.enqueue(1);
  EXPECT_EQ(dequeue(queue), (Items{1}));
}

TEST(BatchingQueueTest, NoBatchIsHeldBackBeyondTheTimeout) {
  Queue queue({.timeout = 1ms, .moment = kForEver});
  const auto announced = regulars(queue, 10);
  queue.enqueue(1);
  EXPECT_EQ(dequeue(queue), (Items{1}));
}

TEST(BatchingQueueTest, NoMoreThanTheMaximumIsWaitedFor) {
  Queue queue({.maximum_batch_size = 2, .moment = kForEver});
  const auto announced = regulars(queue, 10);
  for (int i = 0; i < 2; ++i) queue.enqueue(i);
  EXPECT_EQ(dequeue(queue), (Items{0, 1}));
}

TEST(BatchingQueueTest, AProducerThatLeavesIsNotWaitedForAnyMore) {
  Queue queue({.moment = kForEver});
  auto announced = regulars(queue, 3);
  Background<MaybeItems> consumer([&] { return dequeue(queue); });
  queue.enqueue(1);
  wait_for_gathering(queue);
  announced.pop_back();
  EXPECT_EQ(consumer.get(), (Items{1}));
}

TEST(BatchingQueueTest, WhatOneConsumerHoldsBackNoOtherTakes) {
  Queue queue({.maximum_batch_size = 2, .moment = kForEver});
  const auto announced = regulars(queue, 4);
  Background<MaybeItems> first([&] { return dequeue(queue); });
  queue.enqueue(1);
  wait_for_gathering(queue);
  Background<MaybeItems> second([&] { return dequeue(queue); });
  wait_for_consumers(queue, 2);
  queue.enqueue(2);
  EXPECT_EQ(first.get(), (Items{1, 2}));
  queue.enqueue(3);
  queue.enqueue(4);
  EXPECT_EQ(second.get(), (Items{3, 4}));
}

TEST(BatchingQueueTest, WhatIsHeldBackIsNotLostByAClose) {
  Queue queue({.moment = kForEver});
  const auto announced = regulars(queue, 4);
  Background<MaybeItems> consumer([&] { return dequeue(queue); });
  queue.enqueue(1);
  wait_for_gathering(queue);
  queue.close();
  EXPECT_EQ(consumer.get(), (Items{1}));
}

// ---- Endings ---------------------------------------------------------------------------------

TEST(BatchingQueueTest, AfterCloseBothSidesEnd) {
  Queue queue({});
  queue.enqueue(1);
  queue.close();
  EXPECT_TRUE(queue.is_closed());
  EXPECT_EQ(queue.size(), 0) << "items that nobody waited for are dropped";
  EXPECT_EQ(message_of<ClosedBatchingQueue>([&] { queue.enqueue(2); }), "Enqueue to closed queue");
  EXPECT_EQ(dequeue(queue), std::nullopt);
}

TEST(BatchingQueueTest, ASecondCloseIsAnError) {
  Queue queue({});
  queue.close();
  EXPECT_EQ(message_of<std::runtime_error>([&] { queue.close(); }), "Queue was closed already");
  EXPECT_FALSE(queue.try_close());
}

TEST(BatchingQueueTest, CloseWakesEveryConsumer) {
  Queue queue({.minimum_batch_size = 2});
  Background<MaybeItems> first([&] { return dequeue(queue); });
  Background<MaybeItems> second([&] { return dequeue(queue); });
  wait_for_consumers(queue, 2);
  queue.close();
  EXPECT_EQ(first.get(), std::nullopt);
  EXPECT_EQ(second.get(), std::nullopt);
}

TEST(BatchingQueueTest, CloseWakesEveryProducerThatWaitsForRoom) {
  Queue queue({.maximum_batch_size = 1, .maximum_queue_size = 1});
  queue.enqueue(0);
  const auto blocked = [&] { return message_of<ClosedBatchingQueue>([&] { queue.enqueue(1); }); };
  Background<std::string> first(blocked), second(blocked);
  wait_for_producers(queue, 2);
  queue.close();
  EXPECT_EQ(first.get(), "Enqueue to closed queue");
  EXPECT_EQ(second.get(), "Enqueue to closed queue");
}

TEST(BatchingQueueTest, WhatWasHandedOverToAWaitingConsumerIsNotLostByAClose) {
  Queue queue({.minimum_batch_size = 2});
  Background<MaybeItems> consumer([&] { return dequeue(queue); });
  wait_for_consumers(queue, 1);
  queue.enqueue(1);
  queue.close();
  EXPECT_EQ(consumer.get(), (Items{1}));
  EXPECT_EQ(dequeue(queue), std::nullopt);
}

TEST(BatchingQueueTest, WaitingConsumersShareOutWhatIsLeftAtAClose) {
  Queue queue({.minimum_batch_size = 3, .maximum_batch_size = 3});
  Background<MaybeItems> first([&] { return dequeue(queue); });
  Background<MaybeItems> second([&] { return dequeue(queue); });
  wait_for_consumers(queue, 2);
  queue.enqueue(1);
  queue.enqueue(2);
  queue.close();
  Items got = first.get().value_or(Items{});
  for (const int item : second.get().value_or(Items{})) got.push_back(item);
  EXPECT_EQ(got, (Items{1, 2}));
  EXPECT_EQ(queue.size(), 0);
}

TEST(BatchingQueueTest, DroppedItemsAreDestroyedAtTheClose) {
  const auto item = std::make_shared<int>(1);
  BatchingQueue<std::shared_ptr<int>> queue({});
  queue.enqueue(item);
  EXPECT_EQ(item.use_count(), 2);
  queue.close();
  EXPECT_EQ(item.use_count(), 1);
}

TEST(BatchingQueueTest, ADroppedItemMayUseTheQueueInItsDestructor) {
  struct Asks {
    BatchingQueue<std::shared_ptr<Asks>>* queue;
    bool* was_closed;
    ~Asks() { *was_closed = queue->is_closed(); }
  };
  BatchingQueue<std::shared_ptr<Asks>> queue({});
  bool was_closed = false;
  queue.enqueue(std::shared_ptr<Asks>(new Asks{&queue, &was_closed}));
  queue.close();
  EXPECT_TRUE(was_closed);
}

TEST(BatchingQueueTest, ManyProducersAndConsumersLoseAndDoubleNothing) {
  constexpr int kThreads = 4, kItems = 250;
  Queue queue({.maximum_batch_size = 3, .maximum_queue_size = 4});
  std::vector<std::unique_ptr<Background<void>>> producers;
  std::vector<std::unique_ptr<Background<Items>>> consumers;
  std::atomic<int> taken = 0;
  for (int thread = 0; thread < kThreads; ++thread) {
    producers.push_back(std::make_unique<Background<void>>([&queue, thread] {
      for (int i = 0; i < kItems; ++i) queue.enqueue(thread * kItems + i);
    }));
    consumers.push_back(std::make_unique<Background<Items>>([&] {
      Items got;
      while (const auto items = queue.dequeue_many()) {
        got.insert(got.end(), items->begin(), items->end());
        taken += static_cast<int>(items->size());
      }
      return got;
    }));
  }
  for (auto& producer : producers) producer->get();
  until([&] { return taken == kThreads * kItems; }, "every item being taken");
  queue.close();
  Items all;
  for (auto& consumer : consumers) {
    for (const int item : consumer->get()) all.push_back(item);
  }
  std::sort(all.begin(), all.end());
  Items expected(kThreads * kItems);
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(all, expected);
}

}  // namespace
}  // namespace torchbeast
