// SPDX-License-Identifier: Apache-2.0
//
// What stands in which row of a rollout, by definition.

#include "libtorchbeast/acting/rollout_writer.h"

#include <gtest/gtest.h>

#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using testing::array_of;
using testing::message_of;
using testing::same_bytes;
using testing::tuple;
using testing::values_of;

using Ints = std::vector<std::int32_t>;
using Longs = std::vector<std::int64_t>;

// Step t of E environments: every number in it is 10 t + e. Bit e of `truncated` is set where
// environment e is truncated; its final observation is then 1000 + 10 t + e.
StreamStep step_of(std::int64_t num_envs, std::int32_t t, unsigned truncated = 0) {
  const Shape shape{1, num_envs};
  StreamStep step{.observation = {},
                  .reward = Array(DType::kFloat32, shape),
                  .done = Array::zeros(DType::kBool, shape),
                  .episode_step = Array(DType::kInt32, shape),
                  .episode_return = Array(DType::kFloat32, shape),
                  .terminated = Array::zeros(DType::kBool, shape),
                  .truncated = Array::zeros(DType::kBool, {1, num_envs}),
                  .episode_end = Array::zeros(DType::kBool, shape)};
  Array observation(DType::kInt32, {1, num_envs, 1});
  Ints finals;
  for (std::int64_t e = 0; e < num_envs; ++e) {
    const auto value = static_cast<std::int32_t>(10 * t + e);
    observation.as<std::int32_t>()[e] = value;
    step.reward.as<float>()[e] = static_cast<float>(value);
    step.episode_step.as<std::int32_t>()[e] = value;
    step.episode_return.as<float>()[e] = static_cast<float>(value);
    const bool cut = (truncated >> e & 1) != 0;
    step.truncated.as<bool>()[e] = step.done.as<bool>()[e] = cut;
    if (cut) finals.push_back(1000 + value);
  }
  step.observation = tuple({observation});
  if (!finals.empty()) {
    Array array(DType::kInt32, {static_cast<std::int64_t>(finals.size()), 1});
    std::copy(finals.begin(), finals.end(), array.as<std::int32_t>());
    step.final_observation = tuple({array});
  }
  return step;
}

// The agent's outputs (action,) that led to step t: 100 t + e, by weights of version t.
AgentStep agent_of(std::int64_t num_envs, std::int32_t t) {
  Array action(DType::kInt32, {1, num_envs});
  for (std::int64_t e = 0; e < num_envs; ++e) {
    action.as<std::int32_t>()[e] = static_cast<std::int32_t>(100 * t + e);
  }
  return {.outputs = tuple({action}), .policy_version = t};
}

// float32 [2, E, 1]
ArrayNest state_of(std::int64_t num_envs, float value) {
  return tuple({Array::filled<float>({2, num_envs, 1}, value)});
}

// The leaves of an item by name.
struct View {
  explicit View(const QueueItem& item) : item_(item) {}
  const ArrayNest& env(std::size_t i) const {
    return item_.data.as_vector()[0].as_vector()[0].as_vector()[i];
  }
  Array observation() const { return env(0).as_vector()[0].as_leaf(); }
  Array action() const { return item_.data.as_vector()[0].as_vector()[1].as_vector()[0].as_leaf(); }
  const ArrayNest& state() const { return item_.data.as_vector()[1]; }
  Array info(const char* key) const { return item_.info.as_map().at(key).as_leaf(); }
  Array finals() const {
    return item_.info.as_map().at("final_observation").as_vector()[0].as_leaf();
  }
  const QueueItem item_;
};

// Plays steps first .. first + T; truncated[i] is for step first + i.
std::vector<QueueItem> play(RolloutWriter& writer, std::int64_t num_envs, std::int32_t first,
                            const std::vector<unsigned>& truncated, float next_state = 0) {
  for (std::size_t i = 0; i < truncated.size(); ++i) {
    const auto t = static_cast<std::int32_t>(first + static_cast<std::int32_t>(i));
    const bool full = writer.append(step_of(num_envs, t, truncated[i]), agent_of(num_envs, t));
    EXPECT_EQ(full, i + 1 == truncated.size()) << "a rollout is full after T steps";
  }
  return writer.complete(state_of(num_envs, next_state));
}

RolloutWriter started(std::int64_t num_envs, std::int64_t columns, std::int64_t unroll_length = 2) {
  RolloutWriter writer(
      {.unroll_length = unroll_length, .num_envs = num_envs, .columns = columns, .first_env = 100});
  writer.start(step_of(num_envs, 0), agent_of(num_envs, 7), state_of(num_envs, 1));
  return writer;
}

TEST(RolloutWriterTest, ARowHoldsWhatAnActionLedToAndTheActionItself) {
  RolloutWriter writer = started(2, 2);
  const View item(play(writer, 2, 1, {0, 0}).at(0));
  EXPECT_EQ(values_of<std::int32_t>(item.observation()), (Ints{0, 1, 10, 11, 20, 21}));
  EXPECT_EQ(values_of<std::int32_t>(item.action()), (Ints{0, 0, 100, 101, 200, 201}))
      << "no action led to the first row";
  EXPECT_EQ(values_of<std::int64_t>(item.info("policy_version")), (Longs{7, 7, 1, 1, 2, 2}));
}

TEST(RolloutWriterTest, ARolloutHasOneRowMoreThanSteps) {
  RolloutWriter writer = started(3, 3, 5);
  const View item(play(writer, 3, 1, {0, 0, 0, 0, 0}).at(0));
  EXPECT_EQ(item.observation().shape(), (Shape{6, 3, 1}));
  for (std::size_t i = 1; i < 5; ++i) EXPECT_EQ(item.env(i).as_leaf().shape(), (Shape{6, 3}));
  for (const char* key : {"policy_version", "terminated", "truncated", "episode_end"}) {
    EXPECT_EQ(item.info(key).shape(), (Shape{6, 3})) << key;
  }
}

TEST(RolloutWriterTest, TheLastRowIsTheFirstOfTheNextRollout) {
  RolloutWriter writer = started(2, 1);
  const auto first = play(writer, 2, 1, {0, 1}), second = play(writer, 2, 3, {0, 0});
  ASSERT_EQ(first.size(), 2u);
  for (std::size_t chunk = 0; chunk < 2; ++chunk) {
    int leaves = 0;
    nest::for_each2(
        [&](const Array& before, const Array& after) {
          EXPECT_TRUE(same_bytes(before.rows(2, 1), after.rows(0, 1)));
          ++leaves;
        },
        first[chunk].data.as_vector()[0], second[chunk].data.as_vector()[0]);
    EXPECT_EQ(leaves, 6);
    for (const char* key : {"policy_version", "terminated", "truncated", "episode_end"}) {
      EXPECT_TRUE(same_bytes(View(first[chunk]).info(key).rows(2, 1),
                             View(second[chunk]).info(key).rows(0, 1)));
    }
  }
}

TEST(RolloutWriterTest, TheAgentStateIsTheOneThatRowZeroIsProcessedWith) {
  RolloutWriter writer = started(2, 2);
  EXPECT_TRUE(same_bytes(View(play(writer, 2, 1, {0, 0}, 5).at(0)).state(), state_of(2, 1)));
  EXPECT_TRUE(same_bytes(View(play(writer, 2, 3, {0, 0}, 6).at(0)).state(), state_of(2, 5)));
}

TEST(RolloutWriterTest, ColumnsAreCutIntoItemsInOrder) {
  RolloutWriter writer = started(4, 2);
  const auto items = play(writer, 4, 1, {0, 0});
  ASSERT_EQ(items.size(), 2u);
  EXPECT_EQ(values_of<std::int32_t>(View(items[0]).observation()), (Ints{0, 1, 10, 11, 20, 21}));
  EXPECT_EQ(values_of<std::int32_t>(View(items[1]).observation()), (Ints{2, 3, 12, 13, 22, 23}));
  EXPECT_EQ(values_of<std::int64_t>(View(items[0]).info("stream")), (Longs{100, 101}));
  EXPECT_EQ(values_of<std::int64_t>(View(items[1]).info("stream")), (Longs{102, 103}));
  EXPECT_EQ(View(items[1]).state().as_vector()[0].as_leaf().shape(), (Shape{2, 2, 1}));
}

TEST(RolloutWriterTest, RolloutsAreNumbered) {
  RolloutWriter writer = started(1, 1);
  for (std::int64_t k = 0; k < 3; ++k) {
    const auto items = play(writer, 1, static_cast<std::int32_t>(1 + 2 * k), {0, 0});
    EXPECT_EQ(values_of<std::int64_t>(View(items.at(0)).info("rollout")), (Longs{k}));
  }
}

TEST(RolloutWriterTest, NumbersGoOnFromWhereTheyAreToldTo) {
  RolloutWriter writer({.unroll_length = 2, .num_envs = 1, .columns = 1, .first_rollout = 7});
  writer.start(step_of(1, 0), agent_of(1, 7), state_of(1, 1));
  for (std::int64_t k = 7; k < 9; ++k) {
    const auto items = play(writer, 1, static_cast<std::int32_t>(2 * k), {0, 0});
    EXPECT_EQ(values_of<std::int64_t>(View(items.at(0)).info("rollout")), (Longs{k}));
  }
}

TEST(RolloutWriterTest, FinalObservationsComeByColumnThenByRow) {
  RolloutWriter writer = started(2, 2, 3);
  const View item(play(writer, 2, 1, {0b11, 0b10, 0b01}).at(0));
  EXPECT_EQ(values_of<std::int32_t>(item.finals()), (Ints{1010, 1030, 1011, 1021}));
  EXPECT_EQ(item.finals().shape(), (Shape{1, 4, 1}));
}

TEST(RolloutWriterTest, FinalObservationsGoWithTheirColumns) {
  RolloutWriter writer = started(2, 1, 3);
  const auto items = play(writer, 2, 1, {0b11, 0b10, 0b01});
  EXPECT_EQ(values_of<std::int32_t>(View(items[0]).finals()), (Ints{1010, 1030}));
  EXPECT_EQ(values_of<std::int32_t>(View(items[1]).finals()), (Ints{1011, 1021}));
}

TEST(RolloutWriterTest, AFinalObservationOfTheLastRowIsNotRepeatedInTheNextRollout) {
  RolloutWriter writer = started(1, 1);
  EXPECT_EQ(values_of<std::int32_t>(View(play(writer, 1, 1, {0, 1}).at(0)).finals()), (Ints{1020}));
  const View next(play(writer, 1, 3, {0, 0}).at(0));
  EXPECT_TRUE(next.info("truncated").as<bool>()[0]);
  EXPECT_EQ(next.finals().shape(), (Shape{1, 0, 1}));
}

TEST(RolloutWriterTest, WhatWasHandedOverIsNeverWrittenAgain) {
  RolloutWriter writer = started(2, 1);
  const auto items = play(writer, 2, 1, {0b11, 0});
  const ArrayNest before = nest::map([](const Array& leaf) { return leaf.clone(); }, items[0].data);
  for (std::int32_t k = 0; k < 3; ++k) play(writer, 2, 3 + 2 * k, {0, 0b01}, 9);
  EXPECT_TRUE(same_bytes(items[0].data, before));
}

TEST(RolloutWriterTest, ItemsOfOneStreamCanBeJoined) {
  RolloutWriter writer = started(4, 2);
  RolloutQueue queue({});
  for (QueueItem& item : play(writer, 4, 1, {0b1001, 0})) queue.enqueue(std::move(item));
  for (QueueItem& item : play(writer, 4, 3, {0, 0})) queue.enqueue(std::move(item));
  const View batch(*queue.dequeue());
  EXPECT_EQ(batch.observation().shape(), (Shape{3, 8, 1}));
  EXPECT_EQ(values_of<std::int32_t>(batch.finals()), (Ints{1010, 1013}));
}

TEST(RolloutWriterTest, TheInfoStandsInTheRowOfItsStepAndOnlyWithKeywords) {
  RolloutWriter writer({.unroll_length = 2, .num_envs = 2, .columns = 1});
  const auto told = [](std::int32_t t) {
    StreamStep step = step_of(2, t);
    const auto value = static_cast<float>(t);
    step.info.emplace("score", ArrayNest(array_of<float>({1, 2}, {value, value + 0.5f})));
    return step;
  };
  writer.start(told(0), agent_of(2, 0), state_of(2, 0));
  writer.append(told(1), agent_of(2, 1));
  writer.append(told(2), agent_of(2, 2));
  const auto items = writer.complete(state_of(2, 0));
  const auto score = [](const QueueItem& item) {
    return item.info.as_map().at("info").as_map().at("score").as_leaf();
  };
  EXPECT_EQ(values_of<float>(score(items[0])), (std::vector<float>{0, 1, 2}));
  EXPECT_EQ(values_of<float>(score(items[1])), (std::vector<float>{0.5, 1.5, 2.5}));
  EXPECT_EQ(score(items[1]).shape(), (Shape{3, 1}));
  RolloutWriter untold = started(2, 2);
  EXPECT_EQ(play(untold, 2, 1, {0, 0}).at(0).info.as_map().count("info"), 0u);
}

// ---- What is refused -------------------------------------------------------------------------

TEST(RolloutWriterTest, ColumnsThatDoNotDivideTheStreamAreRefused) {
  EXPECT_EQ(message_of<std::invalid_argument>(
                [] { RolloutWriter({.unroll_length = 1, .num_envs = 4, .columns = 3}); }),
            "rollouts of 3 columns cannot be cut from a stream of 4 environments; the first "
            "must divide the second");
}

TEST(RolloutWriterTest, AgentOutputsNeedTheStreamsColumns) {
  RolloutWriter writer({.unroll_length = 1, .num_envs = 2, .columns = 2});
  EXPECT_EQ(message_of<std::invalid_argument>(
                [&] { writer.start(step_of(2, 0), agent_of(3, 0), state_of(2, 0)); }),
            "every agent output needs shape [1, 2, ...], got [1, 3]");
}

TEST(RolloutWriterTest, AgentOutputsThatChangeAreRefusedAndNeverOverread) {
  RolloutWriter writer = started(2, 2);
  const auto error = [&](ArrayNest outputs) {
    return message_of<std::invalid_argument>(
        [&] { writer.append(step_of(2, 1), {.outputs = std::move(outputs)}); });
  };
  EXPECT_EQ(error(tuple({Array::zeros(DType::kUInt8, {1, 2})})),
            "agent output at [0]: expected int32[1, 2] as before, got uint8[1, 2]");
  EXPECT_EQ(error(tuple({Array::zeros(DType::kInt32, {1, 1})})),
            "agent output at [0]: expected int32[1, 2] as before, got int32[1, 1]");
  const Array action = agent_of(2, 1).outputs.as_vector()[0].as_leaf();
  EXPECT_NE(error(tuple({action, action})).find("Expected vectors of same length"),
            std::string::npos);
}

TEST(RolloutWriterTest, ARolloutThatCannotBeHeldIsRefusedBeforeItIsAllocated) {
  const std::int64_t rows = std::int64_t{1} << 40;  // of 8 bytes of actions alone: 8 TiB
  RolloutWriter writer({.unroll_length = rows - 1, .num_envs = 2, .columns = 2});
  const std::string message =
      message_of<std::invalid_argument>([&] { writer.start(step_of(2, 0), agent_of(2, 0), {}); });
  EXPECT_NE(message.find("rollouts of 1099511627776 rows of a stream would take"),
            std::string::npos)
      << message;
  EXPECT_NE(message.find("expected at most 8192: shorten --unroll_length"), std::string::npos);
}

TEST(RolloutWriterTest, FinalObservationsCountForTheSizeOfTheirRollout) {
  constexpr std::int64_t kMebibyte = 1 << 20;
  RolloutWriter writer(
      {.unroll_length = 3, .num_envs = 1, .columns = 1, .max_bytes = 2.5 * kMebibyte});
  writer.start(step_of(1, 0), agent_of(1, 0), state_of(1, 0));
  StreamStep cut = step_of(1, 1, 1);
  cut.final_observation = tuple({Array::zeros(DType::kUInt8, {1, kMebibyte})});
  for (int rollout = 0; rollout < 2; ++rollout) {  // two fit into each
    writer.append(cut, agent_of(1, 1));
    writer.append(cut, agent_of(1, 2));
    writer.append(step_of(1, 3), agent_of(1, 3));
    writer.complete(state_of(1, 0));
  }
  writer.append(cut, agent_of(1, 1));
  writer.append(cut, agent_of(1, 2));
  EXPECT_EQ(message_of<std::invalid_argument>([&] { writer.append(cut, agent_of(1, 3)); }),
            "a stream's rollout with the final observations of its first 4 rows would take 3 MiB, "
            "expected at most 2: shorten --unroll_length, or serve fewer environments in a stream "
            "(more --num_servers)");
}

TEST(RolloutWriterTest, TheInfoCountsForTheSizeOfARollout) {
  const auto started_with = [](int keywords) {
    StreamStep step = step_of(2, 0);
    for (int k = 0; k < keywords; ++k) {
      step.info.emplace(std::to_string(k), ArrayNest(Array::zeros(DType::kFloat32, {1, 2})));
    }
    RolloutWriter writer({.unroll_length = std::int64_t{1} << 40, .num_envs = 2, .columns = 2});
    return message_of<std::invalid_argument>(
        [&] { writer.start(step, agent_of(2, 0), state_of(2, 0)); });
  };
  const auto mebibytes = [](const std::string& message) {
    return std::stoll(message.substr(message.find("would take ") + 11));
  };
  EXPECT_EQ(mebibytes(started_with(3)) - mebibytes(started_with(0)), 3 * 8 * (1 << 20))
      << "three numbers of 4 bytes, for 2 environments, in 2^40 rows";
}

}  // namespace
}  // namespace torchbeast
