// SPDX-License-Identifier: Apache-2.0
// A deterministic environment whose observations show where they come from.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "libtorchbeast/server/env.h"
#include "libtorchbeast/support/errors.h"

namespace torchbeast::testing {

// The result of one step of a FakeGame.
struct GameStep {
  std::int32_t observation;  // of the next game if one ended
  float reward;
  bool terminated, truncated, episode_end;
  std::int32_t last_observation;  // of the game that ended
};

// One deterministic environment whose observations encode environment, game and step.
//
// Games with even numbers end terminated, games with odd numbers truncated. In every third game a
// life is lost too: the step is terminated, though the game continues. The only valid action is the
// newest observation, so a policy that answers the wrong environment, or too late, is detected.
class FakeGame {
 public:
  explicit FakeGame(int env) : env_(env) {}

  std::int32_t observation() const { return env_ * 1'000'000 + game_ * 1'000 + step_; }

  GameStep step(std::int64_t action) {
    if (action != observation()) {
      throw EnvironmentFailure("action " + std::to_string(action) + " came for observation " +
                               std::to_string(observation()));
    }
    ++step_;
    const bool over = step_ == length();
    const bool truncated = over && game_ % 2 == 1;
    const bool life_lost = game_ % 3 == 0 && step_ == 2;
    const std::int32_t last = observation();
    const auto reward = static_cast<float>(step_ + env_);
    if (over) {
      ++game_;
      step_ = 0;
    }
    return {observation(), reward, !truncated && (over || life_lost), truncated, over, last};
  }

 private:
  int length() const { return 3 + env_ % 3; }

  const int env_;
  int game_ = 0;
  int step_ = 0;
};

struct FakeEnvOptions {
  int num_envs = 1;
  int frame_stack = 1;
  int first = 0;         // the first environment's number
  int num_keywords = 0;  // of the info: number k of a game is its last observation + k / 2
  std::function<void(std::uint64_t seed)> on_reset = [](std::uint64_t) {};
  std::function<void(const std::string& json)> on_options = [](const std::string&) {};
  std::function<void(int step)> on_step = [](int) {};  // before the step; an exception ends it
  std::function<void()> on_destruction = [] {};
};

// Number k in the info of a game's last step; exact for environments below 8 and two numbers.
inline float number_of(const GameStep& last, int k) {
  return static_cast<float>(last.last_observation) + 0.5f * static_cast<float>(k);
}

// E FakeGames. Observation: {"frame": int32 [E, 1]}; actions: int64 [E].
class FakeEnv final : public Env {
 public:
  explicit FakeEnv(FakeEnvOptions options) : options_(std::move(options)) {}
  ~FakeEnv() override { options_.on_destruction(); }

  std::int64_t num_envs() const override { return options_.num_envs; }
  std::int64_t frame_stack() const override { return options_.frame_stack; }
  std::string action_space() const override { return R"({"type": "Discrete", "n": 2})"; }

  void set_options(const std::string& json) override { options_.on_options(json); }

  ArrayNest reset(std::uint64_t seed) override {
    options_.on_reset(seed);
    games_.clear();
    for (int e = 0; e < options_.num_envs; ++e) games_.emplace_back(options_.first + e);
    return observation();
  }

  EnvStep step(const ArrayNest& action) override {
    options_.on_step(steps_++);
    const Shape shape{options_.num_envs};
    EnvStep result{.observation = {},
                   .reward = Array(DType::kFloat32, shape),
                   .terminated = Array(DType::kBool, shape),
                   .truncated = Array(DType::kBool, shape),
                   .episode_end = Array(DType::kBool, shape)};
    std::vector<std::int32_t> finals;
    std::vector<float> numbers;
    for (std::size_t e = 0; e < games_.size(); ++e) {
      const GameStep step = games_[e].step(action.as_leaf().as<std::int64_t>()[e]);
      result.reward.as<float>()[e] = step.reward;
      result.terminated.as<bool>()[e] = step.terminated;
      result.truncated.as<bool>()[e] = step.truncated;
      result.episode_end.as<bool>()[e] = step.episode_end;
      if (step.truncated) finals.push_back(step.last_observation);
      for (int k = 0; step.episode_end && k < options_.num_keywords; ++k) {
        numbers.push_back(number_of(step, k));
      }
    }
    result.observation = observation();
    if (!finals.empty()) result.final_observation = frames(finals);
    if (!numbers.empty()) result.info = rows(numbers);
    return result;
  }

 private:
  static ArrayNest frames(const std::vector<std::int32_t>& values) {
    Array array(DType::kInt32, {static_cast<std::int64_t>(values.size()), 1});
    std::copy(values.begin(), values.end(), array.as<std::int32_t>());
    return ArrayNest(ArrayNest::Map{{"frame", ArrayNest(array)}});
  }

  Array rows(const std::vector<float>& numbers) const {
    const auto games = static_cast<std::int64_t>(numbers.size()) / options_.num_keywords;
    Array array(DType::kFloat32, {games, options_.num_keywords});
    std::copy(numbers.begin(), numbers.end(), array.as<float>());
    return array;
  }

  ArrayNest observation() const {
    std::vector<std::int32_t> values;
    for (const FakeGame& game : games_) values.push_back(game.observation());
    return frames(values);
  }

  const FakeEnvOptions options_;
  std::vector<FakeGame> games_;
  int steps_ = 0;
};

inline EnvFactory fake_env(FakeEnvOptions options = {}) {
  return [options = std::move(options)] { return std::make_unique<FakeEnv>(options); };
}

}  // namespace torchbeast::testing
