// SPDX-License-Identifier: Apache-2.0
//
// The learner's end of a stream: what it makes of steps, what it refuses, how it ends.

#include "libtorchbeast/stream/env_stream.h"

#include <gtest/gtest.h>

#include <cmath>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/stream/describe.h"
#include "libtorchbeast/testing/fake_env.h"
#include "libtorchbeast/testing/servers.h"
#include "libtorchbeast/testing/threads.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using namespace std::chrono_literals;
using testing::array_of;
using testing::Background;
using testing::fake_env;
using testing::FakeGame;
using testing::GameStep;
using testing::Hanging;
using testing::kPatience;
using testing::message_of;
using testing::Notification;
using testing::RunningServer;
using testing::Script;
using testing::ScriptedServer;
using testing::TestFolder;
using testing::until;
using testing::values_of;
using testing::VectorCall;

Array frame_of(const StreamStep& step) { return step.observation.as_map().at("frame").as_leaf(); }

// The newest frame of each environment, which is the action that FakeGames take.
ArrayNest echo(const StreamStep& step) {
  const Array frame = frame_of(step);  // [1, E, k]
  Array action(DType::kInt64, {1, frame.size(1)});
  for (std::int64_t e = 0; e < frame.size(1); ++e) {
    action.as<std::int64_t>()[e] = frame.as<std::int32_t>()[(e + 1) * frame.size(2) - 1];
  }
  return action;
}

// ---- Steps -----------------------------------------------------------------------------------

TEST(EnvStreamTest, EveryStepIsWhatTheGamesPlayedAloneGive) {
  constexpr int kEnvs = 3;
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = kEnvs}), folder.address());
  EnvStream stream(folder.address(), kPatience);
  StreamStep step = stream.connect(1, kPatience);
  EXPECT_EQ(stream.num_envs(), kEnvs);
  EXPECT_EQ(values_of<bool>(step.done), (std::vector<bool>{true, true, true}));
  EXPECT_EQ(values_of<bool>(step.episode_end), (std::vector<bool>{false, false, false}));

  std::vector<FakeGame> games;
  for (int e = 0; e < kEnvs; ++e) games.emplace_back(e);
  std::vector<int> episode_steps(kEnvs);
  std::vector<float> episode_returns(kEnvs);
  int finals_seen = 0;
  for (int t = 0; t < 40; ++t) {
    step = stream.step(echo(step));
    std::vector<std::int32_t> finals;
    for (std::size_t e = 0; e < kEnvs; ++e) {
      const GameStep game = games[e].step(games[e].observation());
      EXPECT_EQ(frame_of(step).as<std::int32_t>()[e], game.observation);
      EXPECT_EQ(step.reward.as<float>()[e], game.reward);
      EXPECT_EQ(step.terminated.as<bool>()[e], game.terminated);
      EXPECT_EQ(step.truncated.as<bool>()[e], game.truncated);
      EXPECT_EQ(step.done.as<bool>()[e], game.terminated || game.truncated);
      EXPECT_EQ(step.episode_end.as<bool>()[e], game.episode_end);
      EXPECT_EQ(step.episode_step.as<std::int32_t>()[e], ++episode_steps[e]);
      EXPECT_EQ(step.episode_return.as<float>()[e], episode_returns[e] += game.reward);
      if (game.truncated) finals.push_back(game.last_observation);
      if (game.episode_end) episode_steps[e] = 0, episode_returns[e] = 0;
    }
    ASSERT_EQ(step.final_observation.has_value(), !finals.empty());
    if (finals.empty()) continue;
    EXPECT_EQ(values_of<std::int32_t>(step.final_observation->as_map().at("frame").as_leaf()),
              finals);
    ++finals_seen;
  }
  EXPECT_GT(finals_seen, 3);
  stream.close();
}

TEST(EnvStreamTest, StacksAreRebuiltAlsoForFinalObservations) {
  TestFolder folder;
  RunningServer server(fake_env({.frame_stack = 2}), folder.address());
  EnvStream stream(folder.address(), kPatience);
  StreamStep step = stream.connect(1, kPatience);
  EXPECT_EQ(values_of<std::int32_t>(frame_of(step)), (std::vector<std::int32_t>{0, 0}));
  for (int t = 0; t < 3; ++t) step = stream.step(echo(step));
  EXPECT_EQ(values_of<std::int32_t>(frame_of(step)), (std::vector<std::int32_t>{1000, 1000}));
  for (int t = 0; t < 3; ++t) step = stream.step(echo(step));
  EXPECT_EQ(values_of<std::int32_t>(step.final_observation->as_map().at("frame").as_leaf()),
            (std::vector<std::int32_t>{1002, 1003}));
}

TEST(EnvStreamTest, ClosingIsAnOrderlyEndForTheServer) {
  TestFolder folder;
  Notification gone;
  RunningServer server(
      fake_env({.on_destruction = [&] { gone.notify(); }}), folder.address(),
      {.description = EnvDescription{.observation = ArrayNest(ArrayNest::Map{
                                         {"frame", ArrayNest(Array::spec(DType::kInt32, {1}))}})}});
  EnvStream stream(folder.address(), kPatience);
  stream.connect(1, kPatience);
  stream.close();
  gone.wait();
}

// A server that knows the original protocol only: games of 2 steps, `done` first.
grpc::Status original_game(testing::OriginalCall* stream) {
  rpcenv::Action action;
  for (std::int32_t t = 0;; ++t) {
    rpcenv::Step step;
    codec::encode(ArrayNest(array_of<std::int32_t>({1}, {t})), step.mutable_observation());
    step.set_reward(t == 0 ? 0 : 0.5f);
    step.set_done(t % 2 == 0);
    step.set_episode_step(t == 0 ? 0 : 2 - t % 2);
    step.set_episode_return(static_cast<float>(step.episode_step()) / 2);
    if (!stream->Write(step) || !stream->Read(&action)) return grpc::Status::OK;
    const Array leaf = codec::decode(action.nest_action()).as_leaf();
    if (leaf.ndim() != 0 || leaf.as<std::int64_t>()[0] != t) {
      return {grpc::StatusCode::INTERNAL, "the action did not come as it was sent"};
    }
  }
}

TEST(EnvStreamTest, AnOriginalServerIsPlayedToo) {
  TestFolder folder;
  ScriptedServer server({.original_stream = original_game}, folder.address());
  EXPECT_EQ(describe_server(folder.address(), kPatience).protocol_version, 0);
  EnvStream stream(folder.address(), kPatience);
  StreamStep step = stream.connect(1, kPatience);
  std::vector<bool> done, end;
  std::vector<std::int32_t> steps;
  for (std::int64_t t = 0; t < 4; ++t) {
    EXPECT_EQ(step.observation.as_leaf().shape(), (Shape{1, 1, 1}));
    EXPECT_EQ(step.observation.as_leaf().as<std::int32_t>()[0], t);
    done.push_back(step.done.as<bool>()[0]);
    end.push_back(step.episode_end.as<bool>()[0]);
    steps.push_back(step.episode_step.as<std::int32_t>()[0]);
    step = stream.step(ArrayNest(array_of<std::int64_t>({1, 1}, {t})));
  }
  EXPECT_EQ(done, (std::vector<bool>{true, false, true, false}));
  EXPECT_EQ(end, (std::vector<bool>{false, false, true, false}))
      << "the first step ends no episode";
  EXPECT_EQ(steps, (std::vector<std::int32_t>{0, 1, 2, 1}));
  stream.close();
}

// ---- What a server may not send --------------------------------------------------------------

rpcenv::Description sound_description() {
  rpcenv::Description message;
  message.set_protocol_version(1);
  message.set_num_envs(2);
  message.set_num_streams(1);
  message.set_frame_stack(1);
  codec::encode_spec(ArrayNest(Array::spec(DType::kInt32, {1})), message.mutable_observation());
  return message;
}

rpcenv::VectorStep sound_step() {
  rpcenv::VectorStep step;
  codec::encode(ArrayNest(Array::zeros(DType::kInt32, {2, 1})), step.mutable_observation());
  codec::encode(Array::zeros(DType::kFloat32, {2}), step.mutable_reward());
  codec::encode(Array::zeros(DType::kBool, {2}), step.mutable_terminated());
  codec::encode(Array::zeros(DType::kBool, {2}), step.mutable_truncated());
  codec::encode(Array::zeros(DType::kBool, {2}), step.mutable_episode_end());
  codec::encode(Array::zeros(DType::kInt32, {2}), step.mutable_episode_step());
  codec::encode(Array::zeros(DType::kFloat32, {2}), step.mutable_episode_return());
  return step;
}

Script script_of(const rpcenv::Description& description,
                 std::function<grpc::Status(VectorCall*)> stream = {}) {
  return {.describe =
              [description](rpcenv::Description* message) {
                *message = description;
                return grpc::Status::OK;
              },
          .vector_stream = std::move(stream)};
}

// Sends one step, then waits for the end.
Script sends(const rpcenv::VectorStep& step) {
  return script_of(sound_description(), [step](VectorCall* stream) {
    rpcenv::VectorAction action;
    stream->Read(&action);
    stream->Write(step);
    stream->Read(&action);
    return grpc::Status::OK;
  });
}

// What connect() says to a server, without "environment server at ADDRESS: ".
template <typename Expected = std::invalid_argument>
std::string connect_error(Script script) {
  TestFolder folder;
  ScriptedServer server(std::move(script), folder.address());
  EnvStream stream(folder.address(), kPatience);
  const std::string message = message_of<Expected>([&] { stream.connect(1, kPatience); });
  const std::string origin = "environment server at " + folder.address() + ": ";
  EXPECT_TRUE(message.starts_with(origin)) << message;
  return message.substr(std::min(origin.size(), message.size()));
}

std::string changed_description(const std::function<void(rpcenv::Description*)>& change) {
  rpcenv::Description description = sound_description();
  change(&description);
  return connect_error(script_of(description));
}

std::string changed_step(const std::function<void(rpcenv::VectorStep*)>& change) {
  rpcenv::VectorStep step = sound_step();
  change(&step);
  return connect_error(sends(step));
}

TEST(EnvStreamTest, ASoundScriptIsAccepted) {
  TestFolder folder;
  ScriptedServer server(sends(sound_step()), folder.address());
  EnvStream stream(folder.address(), kPatience);
  EXPECT_EQ(stream.connect(1, kPatience).reward.shape(), (Shape{1, 2}));
  stream.close();
}

TEST(EnvStreamTest, DescriptionsThatMakeNoSenseAreRefused) {
  EXPECT_EQ(changed_description([](auto* message) { message->set_protocol_version(2); }),
            "it speaks protocol version 2, expected 1");
  EXPECT_EQ(changed_description([](auto* message) { message->set_num_envs(0); }),
            "the number of environments of a stream must lie between 1 and 65536, got 0");
  EXPECT_EQ(changed_description([](auto* message) { message->set_num_envs(1 << 30); }),
            "the number of environments of a stream must lie between 1 and 65536, got 1073741824");
  EXPECT_EQ(changed_description([](auto* message) { message->set_num_streams(-1); }),
            "the number of streams must lie between 1 and 1024, got -1");
  EXPECT_EQ(changed_description([](auto* message) { message->set_num_streams(1025); }),
            "the number of streams must lie between 1 and 1024, got 1025");
  EXPECT_EQ(changed_description(
                [](auto* message) { message->set_options(std::string((16 << 20) + 1, ' ')); }),
            "the options: got 16777217 bytes of text, expected at most 16777216");
  EXPECT_EQ(changed_description([](auto* message) { message->set_frame_stack(257); }),
            "the number of frames in a stack must lie between 1 and 256, got 257");
  EXPECT_EQ(changed_description([](auto* message) {
              codec::encode_spec(ArrayNest(Array::spec(DType::kUInt8, {1 << 20})),
                                 message->mutable_observation());
              message->set_num_envs(257);
              message->set_frame_stack(4);
            }),
            "one step of its 257 environments, with stacks of 4 frames, would take 1028 MiB, "
            "expected at most 1024: serve fewer environments in a stream (more --num_servers)");
  EXPECT_EQ(changed_description([](auto* message) {
              codec::encode_spec(ArrayNest(Array::spec(DType::kUInt8, {1 << 14})),
                                 message->mutable_observation());
              message->set_num_envs(1 << 16);
              for (int k = 0; k < 4; ++k) message->add_info_keywords(std::to_string(k));
            }),
            "one step of its 65536 environments, with stacks of 1 frames, would take 1025 MiB, "
            "expected at most 1024: serve fewer environments in a stream (more --num_servers)");
  EXPECT_EQ(changed_description([](auto* message) { message->clear_observation(); }),
            "expected an array, a vector or a map of arrays, got none of them");
}

TEST(EnvStreamTest, InfoKeywordsThatMakeNoSenseAreRefused) {
  const auto described_as = [](const std::vector<std::string>& keywords) {
    return changed_description([&](auto* message) {
      for (const std::string& keyword : keywords) message->add_info_keywords(keyword);
    });
  };
  std::vector<std::string> many;
  for (int k = 0; k < 257; ++k) many.push_back(std::to_string(k));
  EXPECT_EQ(described_as(many), "the number of info keywords must lie between 0 and 256, got 257");
  EXPECT_EQ(described_as({"x", ""}), "an info keyword has 0 bytes, expected 1 to 256");
  EXPECT_EQ(described_as({std::string(257, 'x')}),
            "an info keyword has 257 bytes, expected 1 to 256");
  for (const char* keyword : {"a,b", "a\nb", "\x1b[2J", "a\x7f"}) {
    EXPECT_EQ(described_as({"x", keyword}),
              "an info keyword has a comma or a control character, expected the name of a column");
  }
  EXPECT_EQ(described_as({"x", "y", "x"}), "the info keyword x comes twice, expected once");
}

TEST(EnvStreamTest, ObservationsUnlikeTheDescriptionAreRefusedWithBothSides) {
  EXPECT_EQ(changed_step([](auto* step) {
              codec::encode(Array::zeros(DType::kInt32, {2, 3}),
                            step->mutable_observation()->mutable_array());
            }),
            "observation of a step: expected int32[2, 1] at the root as before, got int32[2, 3]");
  EXPECT_EQ(changed_step([](auto* step) {
              codec::encode(Array::zeros(DType::kFloat32, {2, 1}),
                            step->mutable_observation()->mutable_array());
            }),
            "observation of a step: expected int32[2, 1] at the root as before, got "
            "float32[2, 1]");
}

TEST(EnvStreamTest, AMissingOrMisshapenArrayOfAStepIsRefusedByName) {
  EXPECT_NE(changed_step([](auto* step) { step->clear_reward(); }).find("needs 1 bytes, got 0"),
            std::string::npos);
  EXPECT_EQ(changed_step([](auto* step) {
              codec::encode(Array::zeros(DType::kFloat32, {3}), step->mutable_reward());
            }),
            "reward of a step: expected float32[2], got float32[3]");
  EXPECT_EQ(changed_step([](auto* step) {
              codec::encode(Array::zeros(DType::kUInt8, {2}), step->mutable_terminated());
            }),
            "terminated of a step: expected bool[2], got uint8[2]");
  EXPECT_EQ(changed_step([](auto* step) {
              codec::encode(Array::zeros(DType::kInt64, {2}), step->mutable_episode_step());
            }),
            "episode_step of a step: expected int32[2], got int64[2]");
}

TEST(EnvStreamTest, RewardsThatAreNoNumbersAreRefused) {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const auto& [value, text] :
       {std::pair{std::nanf(""), "nan"}, {infinity, "inf"}, {-infinity, "-inf"}}) {
    EXPECT_EQ(changed_step([value = value](auto* step) {
                codec::encode(array_of<float>({2}, {0, value}), step->mutable_reward());
              }),
              std::string("reward of environment 1 must be a finite number, got ") + text);
  }
}

TEST(EnvStreamTest, AnEpisodeCannotBeBothTerminatedAndTruncated) {
  EXPECT_EQ(changed_step([](auto* step) {
              codec::encode(array_of<bool>({2}, {false, true}), step->mutable_terminated());
              codec::encode(array_of<bool>({2}, {false, true}), step->mutable_truncated());
            }),
            "environment 1 is both terminated and truncated; expected at most one of them");
}

TEST(EnvStreamTest, FinalObservationsMustMatchTheTruncations) {
  const auto truncate = [](rpcenv::VectorStep* step) {
    codec::encode(array_of<bool>({2}, {true, false}), step->mutable_truncated());
  };
  EXPECT_EQ(changed_step(truncate),
            "1 environments were truncated, but the step carries no final observation");
  EXPECT_EQ(changed_step([&](auto* step) {
              truncate(step);
              codec::encode(Array::zeros(DType::kInt32, {2, 1}),
                            step->mutable_final_observation()->mutable_array());
            }),
            "final observation of a step: expected int32[1, 1] at the root as before, got "
            "int32[2, 1]");
}

// A step in which games of two environments ended, each with two numbers, and its description.
rpcenv::Description told_description() {
  rpcenv::Description description = sound_description();
  description.add_info_keywords("score");
  description.add_info_keywords("laps");
  return description;
}

rpcenv::VectorStep told_step() {
  rpcenv::VectorStep step = sound_step();
  codec::encode(Array::filled<bool>({2}, true), step.mutable_episode_end());
  codec::encode(array_of<float>({2, 2}, {1, 2, 3, 4}), step.mutable_info());
  return step;
}

std::string changed_info(const std::function<void(rpcenv::VectorStep*)>& change) {
  rpcenv::VectorStep step = told_step();
  change(&step);
  Script script = sends(step);
  script.describe = script_of(told_description()).describe;
  return connect_error(script);
}

TEST(EnvStreamTest, AnInfoMustHaveANumberForEachKeywordAndGameThatEnded) {
  EXPECT_EQ(changed_info([](auto* step) { step->clear_info(); }),
            "info of a step in which 2 games ended: expected float32[2, 2], got none");
  EXPECT_EQ(changed_info([](auto* step) {
              codec::encode(Array::zeros(DType::kFloat64, {2, 2}), step->mutable_info());
            }),
            "info of a step in which 2 games ended: expected float32[2, 2], got float64[2, 2]");
  EXPECT_EQ(changed_info([](auto* step) {
              codec::encode(Array::zeros(DType::kFloat32, {4}), step->mutable_info());
            }),
            "info of a step in which 2 games ended: expected float32[2, 2], got float32[4]");
  EXPECT_EQ(changed_info([](auto* step) {
              codec::encode(Array::zeros(DType::kFloat32, {2, 3}), step->mutable_info());
            }),
            "info of a step in which 2 games ended: expected float32[2, 2], got float32[2, 3]");
  EXPECT_EQ(changed_info([](auto* step) {
              codec::encode(array_of<bool>({2}, {true, false}), step->mutable_episode_end());
            }),
            "info of a step in which 1 games ended: expected float32[1, 2], got float32[2, 2]");
  EXPECT_NE(changed_info([](auto* step) {
              step->mutable_info()->mutable_data()->pop_back();
            }).find("needs 16 bytes, got 15"),
            std::string::npos);
  EXPECT_EQ(changed_step([](auto* step) { *step = told_step(); }),
            "info of a step in which 2 games ended: expected float32[2, 0], got float32[2, 2]")
      << "the description names no keyword";
}

TEST(EnvStreamTest, ASoundInfoIsAcceptedAndSpreadOverTheEnvironments) {
  TestFolder folder;
  rpcenv::VectorStep told = told_step();
  codec::encode(array_of<bool>({2}, {false, true}), told.mutable_episode_end());
  codec::encode(array_of<float>({1, 2}, {7, std::nanf("")}), told.mutable_info());
  Script script = sends(told);
  script.describe = script_of(told_description()).describe;
  ScriptedServer server(std::move(script), folder.address());
  EnvStream stream(folder.address(), kPatience);
  const StreamStep step = stream.connect(1, kPatience);
  ASSERT_EQ(step.info.size(), 2u);
  const auto score = values_of<float>(step.info.at("score").as_leaf());
  const auto laps = values_of<float>(step.info.at("laps").as_leaf());
  EXPECT_TRUE(std::isnan(score.at(0)) && score.at(1) == 7);
  EXPECT_TRUE(std::isnan(laps.at(0)) && std::isnan(laps.at(1))) << "the game had no such number";
  EXPECT_EQ(step.info.at("laps").as_leaf().shape(), (Shape{1, 2}));
}

// Learners and servers of earlier versions know no info.
TEST(EnvStreamTest, StepsWithoutKeywordsHaveNoInfo) {
  TestFolder folder;
  rpcenv::VectorStep ended = sound_step();
  codec::encode(Array::filled<bool>({2}, true), ended.mutable_episode_end());
  ScriptedServer server(sends(ended), folder.address());
  EnvStream stream(folder.address(), kPatience);
  EXPECT_TRUE(stream.connect(1, kPatience).info.empty());
}

TEST(EnvStreamTest, AFirstStepThatIsTruncatedCannotBeStacked) {
  rpcenv::Description description = sound_description();
  description.set_frame_stack(2);
  rpcenv::VectorStep step = sound_step();
  codec::encode(array_of<bool>({2}, {true, false}), step.mutable_truncated());
  codec::encode(Array::zeros(DType::kInt32, {1, 1}),
                step.mutable_final_observation()->mutable_array());
  Script script = sends(step);
  script.describe = script_of(description).describe;
  EXPECT_EQ(connect_error(script),
            "a final observation came before the first observation of its episode");
}

TEST(EnvStreamTest, AServersStatusDecidesTheException) {
  const auto ends_with = [](grpc::StatusCode code) {
    return script_of(sound_description(),
                     [code](VectorCall*) { return grpc::Status(code, "the reason"); });
  };
  EXPECT_EQ(connect_error<EnvironmentFailure>(ends_with(grpc::StatusCode::INTERNAL)), "the reason");
  EXPECT_EQ(connect_error<std::invalid_argument>(ends_with(grpc::StatusCode::INVALID_ARGUMENT)),
            "the reason");
  EXPECT_EQ(connect_error<LostStream>(ends_with(grpc::StatusCode::UNAVAILABLE)),
            "connection lost (the reason)");
  EXPECT_EQ(connect_error<LostStream>(
                script_of(sound_description(), [](VectorCall*) { return grpc::Status::OK; })),
            "it ended the stream");
}

TEST(EnvStreamTest, WhatAServerSaysAtTheEndIsReadable) {
  const auto says = [](grpc::StatusCode code) {
    return script_of(sound_description(), [code](VectorCall*) {
      return grpc::Status(code, "caf\xC3\xA9 \xFF\x1B[2J\nend");
    });
  };
  const char* shown = "caf\xC3\xA9 ??[2J\nend";
  EXPECT_EQ(connect_error<EnvironmentFailure>(says(grpc::StatusCode::INTERNAL)), shown);
  EXPECT_EQ(connect_error<LostStream>(says(grpc::StatusCode::UNAVAILABLE)),
            std::string("connection lost (") + shown + ")");
}

// gRPC itself ends calls with these codes, too.
TEST(EnvStreamTest, WhatAServerThatMarksFailuresDoesNotMarkIsALostStream) {
  rpcenv::Description description = sound_description();
  description.set_marks_failures(true);
  const auto ends_with = [&](grpc::StatusCode code, const char* text) {
    return script_of(description, [=](VectorCall*) { return grpc::Status(code, text); });
  };
  for (const auto code : {grpc::StatusCode::INTERNAL, grpc::StatusCode::UNKNOWN,
                          grpc::StatusCode::RESOURCE_EXHAUSTED}) {
    EXPECT_EQ(connect_error<LostStream>(ends_with(code, "RST_STREAM")),
              "connection lost (RST_STREAM)");
  }
  const char* large = "Received message larger than max (300 vs. 200)";
  EXPECT_EQ(
      connect_error<std::invalid_argument>(ends_with(grpc::StatusCode::RESOURCE_EXHAUSTED, large)),
      large)
      << "it would be as large again";
}

// What connect() says to the server of a stream whose earlier connection had another description.
std::string error_after(
    const std::function<void(EnvDescription*)>& change,
    const std::function<void(rpcenv::Description*)>& change_now = [](auto*) {}) {
  EnvDescription described = codec::decode(sound_description());
  change(&described);
  rpcenv::Description now = sound_description();
  change_now(&now);
  TestFolder folder;
  std::atomic<int> streams = 0;
  ScriptedServer server(script_of(now,
                                  [&](VectorCall*) {
                                    ++streams;
                                    return grpc::Status::OK;
                                  }),
                        folder.address());
  EnvStream stream(folder.address(), kPatience, described);
  const std::string message =
      message_of<std::invalid_argument>([&] { stream.connect(1, kPatience); });
  EXPECT_EQ(streams, 0) << "no environment is made";
  EXPECT_NE(message.find(folder.address()), std::string::npos) << message;
  EXPECT_NE(message.find("after the connection was lost, "), std::string::npos) << message;
  return message;
}

TEST(EnvStreamTest, AServerThatServesSomethingElseAfterALossIsRefusedWithBothSides) {
  const auto has = [](const std::string& message, const char* text) {
    EXPECT_NE(message.find(text), std::string::npos) << message;
  };
  has(error_after([](auto* before) { before->env_id = "Pong"; }), "is , before it was Pong");
  has(error_after([](auto* before) { before->num_envs = 3; }), "is 2, before it was 3");
  has(error_after([](auto* before) { before->frame_stack = 4; }), "is 1, before it was 4");
  has(error_after([](auto* before) {
        before->observation = ArrayNest(ArrayNest::Map{{"x", before->observation}});
      }),
      "is int32[1] at the root, before it was int32[1] at ['x']");
  has(error_after(
          [](auto* before) { before->observation = ArrayNest(Array::spec(DType::kUInt8, {1})); }),
      "is int32[1] at the root, before it was uint8[1] at the root");
  has(error_after([](auto* before) { before->action_space = "{}"; }), "the action space");
  has(error_after([](auto* before) { before->observation_space = "{}"; }), "observation space");
  has(error_after([](auto* before) { before->options = "{}"; }), "the dict of options");
  has(error_after([](auto* before) { before->info_keywords = {"score", "laps"}; }),
      "the list of info keywords is [], before it was [score, laps]");
}

TEST(EnvStreamTest, LongTextsAreQuotedWhereTheyDiffer) {
  const std::string same(5000, 'a');
  const std::string message =
      error_after([&](auto* before) { before->options = same + "b" + same; },
                  [&](auto* now) { now->set_options(same + "c" + same); });
  EXPECT_NE(message.find("aaac" + std::string(100, 'a')), std::string::npos) << message;
  EXPECT_NE(message.find("aaab" + std::string(100, 'a')), std::string::npos) << message;
  EXPECT_LT(message.size(), 1000u) << message;
}

TEST(EnvStreamTest, AServerThatSaysMoreThanItShouldAndEndsHoldsNobodyUp) {
  TestFolder folder;
  ScriptedServer server(script_of(sound_description(),
                                  [](VectorCall* stream) {
                                    for (int i = 0; i < 50; ++i) stream->Write(sound_step());
                                    return grpc::Status(grpc::StatusCode::INTERNAL, "over");
                                  }),
                        folder.address());
  EnvStream stream(folder.address(), kPatience);
  const ArrayNest action(Array::zeros(DType::kInt64, {1, 2}));
  EXPECT_NE(message_of<EnvironmentFailure>([&] {
              stream.connect(1, kPatience);
              for (int i = 0; i < 60; ++i) stream.step(action);
            }).find("over"),
            std::string::npos);
}

TEST(EnvStreamTest, AnEnvironmentsExceptionArrivesWithItsTextAndTheAddress) {
  TestFolder folder;
  RunningServer server(
      fake_env({.on_step = [](int) { throw EnvironmentFailure("Traceback: ouch"); }}),
      folder.address());
  EnvStream stream(folder.address(), kPatience);
  const StreamStep first = stream.connect(1, kPatience);
  EXPECT_EQ(message_of<EnvironmentFailure>([&] { stream.step(echo(first)); }),
            "environment server at " + folder.address() + ": Traceback: ouch");
}

TEST(EnvStreamTest, AnEnvironmentThatCannotBeMadeIsAFailureOfTheEnvironment) {
  TestFolder folder;
  RunningServer server(
      []() -> std::unique_ptr<Env> { throw EnvironmentFailure("no module named x"); },
      folder.address());
  EnvStream stream(folder.address(), kPatience);
  EXPECT_EQ(message_of<EnvironmentFailure>([&] { stream.connect(1, kPatience); }),
            "environment server at " + folder.address() + ": no module named x");
}

// ---- Endings, each while something waits -----------------------------------------------------

TEST(EnvStreamTest, AServerThatIsNotThereIsALostStreamThatNamesTheAddress) {
  TestFolder folder;
  EnvStream stream(folder.address(), kPatience);
  EXPECT_EQ(message_of<LostStream>([&] { stream.connect(1, 50ms); }),
            "no environment server answers at " + folder.address() +
                " within 50 ms; start one there, or name the address of one that runs");
  EXPECT_TRUE(message_of<TimeoutError>([&] {
                describe_server(folder.address(), 50ms);
              }).starts_with("no environment server answers at "));
}

TEST(EnvStreamTest, AServerThatStartsALittleLaterIsFound) {
  TestFolder folder;
  EnvStream stream(folder.address(), kPatience);
  Background<StreamStep> learner([&] { return stream.connect(1, kPatience); });
  RunningServer server(fake_env(), folder.address());
  EXPECT_EQ(learner.get().reward.shape(), (Shape{1, 1}));
}

TEST(EnvStreamTest, CancelEndsTheWaitForAServerThatIsNotThere) {
  TestFolder folder;
  EnvStream stream(folder.address(), kPatience);
  Background<std::string> learner(
      [&] { return message_of<StreamCancelled>([&] { stream.connect(1, kPatience); }); });
  stream.cancel();
  EXPECT_EQ(learner.get(), "the stream from " + folder.address() + " was cancelled");
}

TEST(EnvStreamTest, CancelEndsTheWaitForADescription) {
  TestFolder folder;
  Hanging hanging;
  ScriptedServer server({.describe =
                             [&](rpcenv::Description*) {
                               hanging.here();
                               return grpc::Status::OK;
                             }},
                        folder.address());
  EnvStream stream(folder.address(), kPatience);
  Background<std::string> learner(
      [&] { return message_of<StreamCancelled>([&] { stream.connect(1, kPatience); }); });
  hanging.reached.wait();
  stream.cancel();
  EXPECT_EQ(learner.get(), "the stream from " + folder.address() + " was cancelled");
  hanging.go_on.notify();
}

TEST(EnvStreamTest, CancelEndsTheWaitForAStep) {
  TestFolder folder;
  Hanging hanging;
  RunningServer server(fake_env({.on_step = [&](int) { hanging.here(); }}), folder.address());
  EnvStream stream(folder.address(), kPatience);
  const StreamStep first = stream.connect(1, kPatience);
  Background<std::string> learner(
      [&] { return message_of<StreamCancelled>([&] { stream.step(echo(first)); }); });
  hanging.reached.wait();
  stream.cancel();
  EXPECT_EQ(learner.get(), "the stream from " + folder.address() + " was cancelled");
  hanging.go_on.notify();
}

TEST(EnvStreamTest, AStreamMayBeCancelledBeforeItBegins) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  EnvStream stream(folder.address(), kPatience);
  stream.cancel();
  EXPECT_THROW(stream.connect(1, kPatience), StreamCancelled);
}

TEST(EnvStreamTest, AStepThatTakesTooLongIsATimeoutOnceSomebodyLooks) {
  TestFolder folder;
  Hanging hanging;
  RunningServer server(
      fake_env({.on_step = [&](int) { hanging.here(); }}), folder.address(),
      {.description = EnvDescription{.observation = ArrayNest(ArrayNest::Map{
                                         {"frame", ArrayNest(Array::spec(DType::kInt32, {1}))}})}});
  EnvStream stream(folder.address(), 100ms);
  const StreamStep first = stream.connect(1, kPatience);
  stream.cancel_if_overdue();  // nothing is waited for
  Background<std::string> learner(
      [&] { return message_of<TimeoutError>([&] { stream.step(echo(first)); }); });
  hanging.reached.wait();
  Notification over;
  Background<void> watcher([&] {
    until([&] {
      stream.cancel_if_overdue();
      return over.happened();
    });
  });
  EXPECT_EQ(learner.get(),
            "environment server at " + folder.address() + " sent no step within 100 ms");
  over.notify();
  watcher.get();
  hanging.go_on.notify();
}

// The limit is found to have passed just as the status arrives: a stream that was overdue once is
// so from then on.
TEST(EnvStreamTest, AStatusThatHasArrivedCountsThoughTheLimitHasPassed) {
  TestFolder folder;
  std::atomic<bool> hangs = true;
  Hanging hanging;
  ScriptedServer server(script_of(sound_description(),
                                  [&](VectorCall*) {
                                    if (hangs) hanging.here();
                                    return grpc::Status(grpc::StatusCode::INTERNAL, "ouch");
                                  }),
                        folder.address());
  EnvStream stream(folder.address(), 3s);
  Background<void> watcher([&] {
    hanging.reached.wait();
    until([&] {
      stream.cancel_if_overdue();
      return !hangs;
    });
  });
  EXPECT_THROW(stream.connect(1, kPatience), TimeoutError);
  hangs = false;
  watcher.get();
  hanging.go_on.notify();
  EXPECT_EQ(message_of<EnvironmentFailure>([&] { stream.connect(1, kPatience); }),
            "environment server at " + folder.address() + ": ouch");
}

TEST(EnvStreamTest, AServerThatStopsMeanwhileIsALostStream) {
  TestFolder folder;
  Hanging hanging;
  RunningServer server(fake_env({.on_step = [&](int) { hanging.here(); }}), folder.address(),
                       {.stop_grace = 1ms});
  EnvStream stream(folder.address(), kPatience);
  const StreamStep first = stream.connect(1, kPatience);
  Background<std::string> learner(
      [&] { return message_of<LostStream>([&] { stream.step(echo(first)); }); });
  hanging.reached.wait();
  Background<void> stopping([&] { server.stop(); });
  EXPECT_TRUE(learner.get().starts_with("environment server at " + folder.address() + ": "));
  hanging.go_on.notify();
  stopping.get();
}

TEST(EnvStreamTest, AServerThatStoppedWhileNobodyWaitedIsALostStream) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  EnvStream stream(folder.address(), kPatience);
  const StreamStep first = stream.connect(1, kPatience);
  server.stop();
  EXPECT_THROW(stream.step(echo(first)), LostStream);
}

// ---- Hosts that have joined -------------------------------------------------------------------

// A host whose step cannot be read.
class Unreadable final : public Wire {
 public:
  explicit Unreadable(std::function<void()> fail) : fail_(std::move(fail)) {}
  bool start(std::uint64_t) override { return true; }
  bool write(const ArrayNest&) override { return true; }
  std::optional<RawStep> read() override {
    fail_();
    return std::nullopt;
  }
  void half_close() override {}
  grpc::Status finish() override { return grpc::Status::OK; }
  bool environment_failed() const override { return false; }
  void cancel() override {}

 private:
  const std::function<void()> fail_;
};

std::string loss_of_a_host(const std::function<void()>& fail) {
  EnvStream stream("a", kPatience, {}, std::make_unique<Unreadable>(fail));
  return message_of<LostStream>([&] { stream.begin(0); });
}

TEST(EnvStreamTest, AStepOfAHostForWhichThereIsNoMemoryIsALoss) {
  EXPECT_EQ(loss_of_a_host([] { throw std::bad_alloc(); }),
            "environment server at a: out of memory");
}

TEST(EnvStreamTest, WhatAPeerMakesUsQuoteIsShortened) {
  const std::string quoted(100 << 20, 'x');
  const std::string message =
      loss_of_a_host([&] { throw std::invalid_argument("the key " + quoted + " is unknown"); });
  EXPECT_LT(message.size(), 70'000u);
  EXPECT_TRUE(message.starts_with("environment server at a: the key xxx"));
  EXPECT_TRUE(message.ends_with("xxx is unknown"));
}

}  // namespace
}  // namespace torchbeast
