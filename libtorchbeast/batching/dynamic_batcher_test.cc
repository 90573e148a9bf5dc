// SPDX-License-Identifier: Apache-2.0
//
// Many callers, one computation: each gets its own slice, or is told why it gets none.

#include "libtorchbeast/batching/dynamic_batcher.h"

#include <gtest/gtest.h>

#include "libtorchbeast/testing/threads.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using namespace std::chrono_literals;
using testing::array_of;
using testing::Background;
using testing::message_of;
using testing::same_bytes;
using testing::tuple;
using testing::until;

constexpr char kDropped[] =
    "The associated promise has been destructed prior to the associated state becoming ready.";
constexpr char kClosedMeanwhile[] = "Batching queue closed during compute";

// Batches as soon as there is one caller, so that no test waits for time to pass.
DynamicBatcherOptions batches_of(std::int64_t minimum) {
  return {.queue = {.minimum_batch_size = minimum, .timeout = std::nullopt}};
}

// int32 [1, n]
Array row(std::initializer_list<std::int32_t> values) {
  return array_of({1, static_cast<std::int64_t>(values.size())}, values);
}

std::string compute_error(DynamicBatcher& batcher, const ArrayNest& inputs) {
  return message_of<std::invalid_argument>([&] { batcher.compute(inputs); });
}

void wait_for_callers(const DynamicBatcher& batcher, int count) {
  until([&] { return batcher.size() == count; }, "a caller waiting");
}

// Callers that come one after the other, so that their order in the batch is known.
class Callers {
 public:
  explicit Callers(DynamicBatcher& batcher) : batcher_(batcher) {}

  void call(const ArrayNest& inputs) {
    answers_.push_back(
        std::make_unique<Background<Answer>>([this, inputs] { return batcher_.compute(inputs); }));
    wait_for_callers(batcher_, static_cast<int>(answers_.size()));
  }

  Answer answer(std::size_t caller) { return answers_.at(caller)->get(); }

  template <typename Expected>
  std::string error(std::size_t caller) {
    return message_of<Expected>([&] { answer(caller); });
  }

 private:
  DynamicBatcher& batcher_;
  std::vector<std::unique_ptr<Background<Answer>>> answers_;
};

TEST(DynamicBatcherTest, EveryCallerGetsItsOwnSlice) {
  DynamicBatcher batcher(batches_of(3));
  Callers callers(batcher);
  callers.call(row({1}));
  callers.call(row({2, 3}));
  callers.call(row({4}));
  const auto batch = batcher.next();
  EXPECT_EQ(batch->size(), 4);
  EXPECT_TRUE(same_bytes(batch->get_inputs(), row({1, 2, 3, 4})));
  batch->set_outputs(tuple({row({10, 20, 30, 40})}), 7);
  EXPECT_TRUE(same_bytes(callers.answer(0).outputs, tuple({row({10})})));
  EXPECT_TRUE(same_bytes(callers.answer(1).outputs, tuple({row({20, 30})})));
  const Answer last = callers.answer(2);
  EXPECT_TRUE(same_bytes(last.outputs, tuple({row({40})})));
  EXPECT_EQ(last.version, 7);
}

TEST(DynamicBatcherTest, SlicesOfOutputsWithSeveralRowsAreTheCallersColumns) {
  DynamicBatcher batcher(batches_of(2));
  Callers callers(batcher);
  callers.call(row({0}));
  callers.call(row({0, 0}));
  batcher.next()->set_outputs(array_of<std::int32_t>({2, 3}, {1, 2, 3, 4, 5, 6}), 0);
  EXPECT_TRUE(same_bytes(callers.answer(0).outputs, array_of<std::int32_t>({2, 1}, {1, 4})));
  EXPECT_TRUE(same_bytes(callers.answer(1).outputs, array_of<std::int32_t>({2, 2}, {2, 3, 5, 6})));
}

TEST(DynamicBatcherTest, OutputsWithoutALeafReachEveryCaller) {
  DynamicBatcher batcher(batches_of(1));
  Callers callers(batcher);
  callers.call(row({1}));
  batcher.next()->set_outputs(tuple({}), 0);
  EXPECT_TRUE(same_bytes(callers.answer(0).outputs, tuple({})));
}

TEST(DynamicBatcherTest, InputsCanBeReadAgain) {
  DynamicBatcher batcher(batches_of(1));
  Callers callers(batcher);
  callers.call(row({1, 2}));
  const auto batch = batcher.next();
  EXPECT_TRUE(same_bytes(batch->get_inputs(), batch->get_inputs()));
  batch->set_outputs(row({1, 2}), 0);
  EXPECT_TRUE(same_bytes(batch->get_inputs(), row({1, 2})));
  callers.answer(0);
}

TEST(DynamicBatcherTest, BatchesMayBeAnsweredInAnyOrder) {
  DynamicBatcher batcher({.queue = {.maximum_batch_size = 1, .timeout = std::nullopt}});
  Callers callers(batcher);
  callers.call(row({1}));
  callers.call(row({2}));
  const auto first = batcher.next(), second = batcher.next();
  second->set_outputs(row({20}), 0);
  EXPECT_TRUE(same_bytes(callers.answer(1).outputs, row({20})));
  first->set_outputs(row({10}), 0);
  EXPECT_TRUE(same_bytes(callers.answer(0).outputs, row({10})));
}

// ---- What is refused -------------------------------------------------------------------------

TEST(DynamicBatcherTest, InputsAreCheckedAsAtTheQueue) {
  DynamicBatcher batcher(batches_of(1));
  EXPECT_EQ(compute_error(batcher, array_of<std::int32_t>({1}, {1})),
            "Enqueued tensors must have more than batch_dim == 1 dimensions, but got 1");
  EXPECT_EQ(compute_error(batcher, tuple({})), "Cannot enqueue empty vector of tensors");
  EXPECT_EQ(compute_error(batcher, tuple({row({1}), row({1, 2})})),
            "all inputs of one compute() need the same size in dimension 1: expected 1, got 2");
  EXPECT_EQ(batcher.size(), 0);
}

TEST(DynamicBatcherTest, InputsUnlikeTheFirstAreRefusedAndTheOthersAreAnswered) {
  DynamicBatcher batcher(batches_of(1));
  Callers callers(batcher);
  callers.call(row({1}));
  EXPECT_EQ(compute_error(batcher, array_of<float>({1, 1}, {1})),
            "expected every item like the first, with int32[1, *] at the root, but got "
            "float32[1, 1]");
  batcher.next()->set_outputs(row({5}), 0);
  EXPECT_TRUE(same_bytes(callers.answer(0).outputs, row({5})));
}

TEST(DynamicBatcherTest, WrongOutputsAreRefusedWithBothSidesAndTheBatchCanStillBeAnswered) {
  DynamicBatcher batcher(batches_of(1));
  Callers callers(batcher);
  callers.call(row({1, 2}));
  const auto batch = batcher.next();
  const auto error = [&](const ArrayNest& outputs) {
    return message_of<std::invalid_argument>([&] { batch->set_outputs(outputs, 0); });
  };
  EXPECT_EQ(error(array_of<std::int32_t>({2}, {1, 2})),
            "With batch dimension 1, output shape must have at least 2 dimensions, but got [2]");
  EXPECT_EQ(error(tuple({row({1, 2}), row({1})})),
            "Output shape must have the same batch dimension as the input batch size. Expected: "
            "2. Observed: 1");
  batch->set_outputs(row({5, 6}), 0);
  EXPECT_TRUE(same_bytes(callers.answer(0).outputs, row({5, 6})));
}

TEST(DynamicBatcherTest, ASecondAnswerIsAnError) {
  DynamicBatcher batcher(batches_of(1));
  Callers callers(batcher);
  callers.call(row({1}));
  const auto batch = batcher.next();
  batch->set_outputs(row({5}), 0);
  EXPECT_EQ(message_of<std::runtime_error>([&] { batch->set_outputs(row({6}), 0); }),
            "set_outputs called twice");
  EXPECT_TRUE(same_bytes(callers.answer(0).outputs, row({5})));
}

TEST(DynamicBatcherTest, UncheckedOutputsThatAreTooSmallAreAnErrorAndNoOverread) {
  for (const Array& outputs :
       {row({1}), array_of<std::int32_t>({2, 1}, {1, 2}), array_of<std::int32_t>({2}, {1, 2}),
        array_of<std::int32_t>({}, {1})}) {
    DynamicBatcher batcher({.check_outputs = false, .queue = {.timeout = std::nullopt}});
    Callers callers(batcher);
    callers.call(row({1, 2, 3}));
    batcher.next()->set_outputs(outputs, 0);
    EXPECT_THROW(callers.answer(0), std::logic_error) << to_string(outputs.shape());
  }
}

// ---- Endings ---------------------------------------------------------------------------------

TEST(DynamicBatcherTest, ABatchThatIsDroppedUnansweredTellsItsCallers) {
  DynamicBatcher batcher(batches_of(2));
  Callers callers(batcher);
  callers.call(row({1}));
  callers.call(row({2}));
  batcher.next().reset();
  EXPECT_EQ(callers.error<AsyncError>(0), kDropped);
  EXPECT_EQ(callers.error<AsyncError>(1), kDropped);
}

TEST(DynamicBatcherTest, CloseEndsCallersWhoseInputsStillWait) {
  DynamicBatcher batcher(batches_of(1));
  Callers callers(batcher);
  callers.call(row({1}));
  batcher.close();
  EXPECT_EQ(callers.error<ClosedBatchingQueue>(0), kClosedMeanwhile);
  EXPECT_EQ(batcher.next(), nullptr);
}

TEST(DynamicBatcherTest, ABatchHandedOutBeforeTheCloseMayStillBeAnswered) {
  DynamicBatcher batcher(batches_of(1));
  Callers callers(batcher);
  callers.call(row({1}));
  const auto batch = batcher.next();
  batcher.close();
  batch->set_outputs(row({5}), 0);
  EXPECT_TRUE(same_bytes(callers.answer(0).outputs, row({5})));
}

TEST(DynamicBatcherTest, ABatchDroppedAfterTheCloseSaysThatItWasClosed) {
  DynamicBatcher batcher(batches_of(1));
  Callers callers(batcher);
  callers.call(row({1}));
  auto batch = batcher.next();
  batcher.close();
  batch.reset();
  EXPECT_EQ(callers.error<ClosedBatchingQueue>(0), kClosedMeanwhile);
}

TEST(DynamicBatcherTest, ABatchMayOutliveTheBatcher) {
  auto batcher = std::make_unique<DynamicBatcher>(batches_of(1));
  Background<Answer> caller([&] { return batcher->compute(row({1})); });
  auto batch = batcher->next();
  batch->set_outputs(row({5}), 0);
  EXPECT_TRUE(same_bytes(caller.get().outputs, row({5})));
  batcher.reset();
  EXPECT_TRUE(same_bytes(batch->get_inputs(), row({1})));
}

TEST(DynamicBatcherTest, CloseEndsAnInferenceThreadThatWaits) {
  DynamicBatcher batcher(batches_of(2));
  Background<bool> inference([&] { return batcher.next() == nullptr; });
  batcher.close();
  EXPECT_TRUE(inference.get());
}

TEST(DynamicBatcherTest, AfterCloseAComputeIsRefused) {
  DynamicBatcher batcher(batches_of(1));
  batcher.close();
  EXPECT_EQ(message_of<ClosedBatchingQueue>([&] { batcher.compute(row({1})); }),
            "Enqueue to closed queue");
  EXPECT_EQ(message_of<std::runtime_error>([&] { batcher.close(); }), "Queue was closed already");
  EXPECT_TRUE(batcher.is_closed());
}

TEST(DynamicBatcherTest, ACallerThatWaitsTooLongIsToldSoAndALateAnswerHurtsNobody) {
  DynamicBatcherOptions options = batches_of(1);
  options.compute_timeout = 5ms;
  DynamicBatcher batcher(options);
  EXPECT_EQ(message_of<TimeoutError>([&] { batcher.compute(row({1})); }),
            "Compute timeout reached.");
  batcher.next()->set_outputs(row({5}), 0);
}

TEST(DynamicBatcherTest, ManyCallersAndInferenceThreadsGetTheirOwnAnswers) {
  constexpr int kCallers = 8, kCalls = 100;
  DynamicBatcher batcher({.queue = {.maximum_batch_size = 5, .timeout = std::nullopt}});
  const auto serve = [&] {
    while (const auto batch = batcher.next()) {
      Array doubled = batch->get_inputs().as_leaf().clone();
      for (std::int64_t i = 0; i < batch->size(); ++i) doubled.as<std::int32_t>()[i] *= 2;
      batch->set_outputs(doubled, 0);
    }
  };
  Background<void> first(serve), second(serve);
  std::vector<std::unique_ptr<Background<int>>> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.push_back(std::make_unique<Background<int>>([&batcher, caller] {
      int right = 0;
      for (int call = 0; call < kCalls; ++call) {
        const std::int32_t value = caller * kCalls + call;
        const Answer answer = batcher.compute(row({value, -value}));
        right += same_bytes(answer.outputs, row({2 * value, -2 * value}));
      }
      return right;
    }));
  }
  for (auto& caller : callers) EXPECT_EQ(caller->get(), kCalls);
  batcher.close();
  first.get();
  second.get();
}

}  // namespace
}  // namespace torchbeast
