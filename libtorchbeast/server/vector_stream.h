// SPDX-License-Identifier: Apache-2.0
// Plays the environments of one stream, and reports environments that failed and do not close.

#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <vector>

#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/server/env.h"

namespace torchbeast {

// Counts the steps and adds up the return of each environment's current episode.
class EpisodeCounters {
 public:
  explicit EpisodeCounters(std::int64_t num_envs)
      : steps_(static_cast<std::size_t>(num_envs)), returns_(static_cast<std::size_t>(num_envs)) {}

  // Adds a step to the counters.
  void add(const EnvStep& step);
  // Resets the counters of environments whose episode ended.
  void restart(const EnvStep& step);

  // The steps so far; 0 in rows of `step` that only begin an episode or a life.
  Array steps(const EnvStep& step) const;
  Array returns() const;

 private:
  std::vector<std::int32_t> steps_;
  std::vector<double> returns_;  // double, because a long sum of floats stops growing
};

// Resets the environments and returns their first observations as a step.
EnvStep first_step(Env& env, std::uint64_t seed);

// Throws std::invalid_argument unless the shapes of an action's leaves begin with `prefix`.
void check_action(const ArrayNest& action, const Shape& prefix);

// The other end of a vector stream, which takes steps and chooses actions.
class VectorPeer {
 public:
  virtual ~VectorPeer() = default;
  // The message for the next step; its memory is reused.
  virtual rpcenv::VectorStep* step() = 0;
  // Sends step() and waits for the next action. Returns false if there are no more actions.
  virtual bool exchange(rpcenv::VectorAction* action) = 0;
  // Counts steps of environments.
  virtual void count(std::int64_t steps) = 0;
};

// Plays a stream from its first message until the peer ends it.
void stream_vector(Env& env, const rpcenv::VectorAction& first, VectorPeer* peer);

// Calls use(env) with an environment that is made for it. If the environment fails, the failure is
// sent only after the environment is destroyed, and the destruction may hang for the same reason as
// the environment. If it takes longer than `close_grace`, the failure is printed on stderr.
void with_environment(const EnvFactory& factory, std::chrono::milliseconds close_grace,
                      const std::function<void(Env&)>& use);

}  // namespace torchbeast
