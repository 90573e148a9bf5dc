// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/vector_stream.h"

#include <algorithm>
#include <cstdio>
#include <future>
#include <string>
#include <thread>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/support/errors.h"

namespace torchbeast {
namespace {

template <typename To, typename From>
Array array_of(const std::vector<From>& values) {
  Array array(kDTypeOf<To>, {static_cast<std::int64_t>(values.size())});
  std::transform(values.begin(), values.end(), array.as<To>(),
                 [](From value) { return static_cast<To>(value); });
  return array;
}

void fill(const EnvStep& step, const EpisodeCounters& counters, rpcenv::VectorStep* message) {
  message->Clear();
  codec::encode(step.observation, message->mutable_observation());
  codec::encode(step.reward, message->mutable_reward());
  codec::encode(step.terminated, message->mutable_terminated());
  codec::encode(step.truncated, message->mutable_truncated());
  codec::encode(step.episode_end, message->mutable_episode_end());
  codec::encode(counters.steps(step), message->mutable_episode_step());
  codec::encode(counters.returns(), message->mutable_episode_return());
  if (step.final_observation) {
    codec::encode(*step.final_observation, message->mutable_final_observation());
  }
  if (step.info) codec::encode(*step.info, message->mutable_info());
}

// Prints a failure on stderr unless the watch ends within `grace`.
//
// Closing: the destructor ends the watch. Where no thread can be started, the failure is printed at
// once.
class FailureWatch {
 public:
  FailureWatch(const std::string& failure, std::chrono::milliseconds grace) {
    try {
      thread_ = std::thread([end = ended_.get_future(), failure, grace] {
        if (end.wait_for(grace) != std::future_status::ready) print(failure);
      });
    } catch (const std::exception&) {
      print(failure);
    }
  }
  ~FailureWatch() {
    ended_.set_value();
    if (thread_.joinable()) thread_.join();
  }
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

 private:
  static void print(const std::string& failure) {
    std::fprintf(stderr, "an environment has failed, and may hang while it is closed: %s\n",
                 failure.c_str());
  }

  std::promise<void> ended_;
  std::thread thread_;
};

}  // namespace

void EpisodeCounters::add(const EnvStep& step) {
  for (std::size_t e = 0; e < steps_.size(); ++e) {
    if (step.resets && step.resets->as<bool>()[e]) continue;
    steps_[e] += 1;
    returns_[e] += step.reward.as<float>()[e];
  }
}

void EpisodeCounters::restart(const EnvStep& step) {
  for (std::size_t e = 0; e < steps_.size(); ++e) {
    if (!step.episode_end.as<bool>()[e]) continue;
    steps_[e] = 0;
    returns_[e] = 0;
  }
}

Array EpisodeCounters::steps(const EnvStep& step) const {
  std::vector<std::int32_t> steps = steps_;
  for (std::size_t e = 0; step.resets && e < steps.size(); ++e) {
    if (step.resets->as<bool>()[e]) steps[e] = 0;
  }
  return array_of<std::int32_t>(steps);
}

Array EpisodeCounters::returns() const { return array_of<float>(returns_); }

EnvStep first_step(Env& env, std::uint64_t seed) {
  const Shape shape{env.num_envs()};
  return {.observation = env.reset(seed),
          .reward = Array::zeros(DType::kFloat32, shape),
          .terminated = Array::filled<bool>(shape, true),
          .truncated = Array::zeros(DType::kBool, shape),
          .episode_end = Array::zeros(DType::kBool, shape)};
}

void check_action(const ArrayNest& action, const Shape& prefix) {
  nest::for_each(
      [&](const Array& leaf) {
        const bool fits = leaf.ndim() >= prefix.size() &&
                          std::equal(prefix.begin(), prefix.end(), leaf.shape().begin());
        if (fits) return;
        throw std::invalid_argument("an action's shape must begin with " + to_string(prefix) +
                                    ", got " + to_string(leaf.shape()));
      },
      action);
}

void stream_vector(Env& env, const rpcenv::VectorAction& first, VectorPeer* peer) {
  EpisodeCounters counters(env.num_envs());
  if (!first.env_options().empty()) env.set_options(first.env_options());
  fill(first_step(env, first.seed()), counters, peer->step());
  rpcenv::VectorAction action;
  while (peer->exchange(&action)) {
    const ArrayNest nest = codec::decode(action.nest_action());
    check_action(nest, {env.num_envs()});
    if (!action.env_options().empty()) env.set_options(action.env_options());
    const EnvStep step = env.step(nest);
    peer->count(env.num_envs());
    counters.add(step);
    fill(step, counters, peer->step());
    counters.restart(step);
  }
}

void with_environment(const EnvFactory& factory, std::chrono::milliseconds close_grace,
                      const std::function<void(Env&)>& use) {
  std::unique_ptr<Env> env = factory();
  try {
    use(*env);
  } catch (const EnvironmentFailure& failure) {
    const FailureWatch watch(failure.what(), close_grace);
    env.reset();
    throw;
  }
}

}  // namespace torchbeast
