// SPDX-License-Identifier: Apache-2.0
// The interface of environments to a server: E of them, reset and stepped together.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libtorchbeast/memory/array_ops.h"
#include "libtorchbeast/proto/description.h"

namespace torchbeast {

// The result of stepping E environments. Leaves and arrays are [E, ...].
struct EnvStep {
  ArrayNest observation;  // if an episode ended: the first observation of the next one
  Array reward;           // float32 [E]
  Array terminated;       // bool [E]
  Array truncated;        // bool [E]; never together with terminated
  Array episode_end;      // bool [E]; the whole game is over, not just a life
  std::optional<ArrayNest> final_observation = {};  // leaves [K, ...], of the K truncated ones
  std::optional<Array> info = {};  // see VectorStep.info in rpcenv.proto; none: no game ended
  // bool [E]; the rows that only begin an episode, with an action that was ignored, reward 0 and
  // terminated true; none: all rows are steps
  std::optional<Array> resets = {};
};

// E environments that are stepped together. If an episode ends, its environment restarts in the
// same step.
//
// Thread safety: only the stream's thread makes, uses and destroys it.
// Errors: an exception ends the stream; EnvironmentFailure contains the environment's traceback.
class Env {
 public:
  virtual ~Env() = default;
  virtual std::int64_t num_envs() const = 0;
  virtual std::int64_t frame_stack() const = 0;
  // One environment's action space as JSON, see rpcenv.proto; empty if unknown.
  virtual std::string action_space() const = 0;
  // The shapes of one environment's action, in the order of its nest's leaves; none if unknown.
  virtual std::optional<std::vector<Shape>> action_shapes() const { return std::nullopt; }
  // Takes a JSON object of options for every later reset of an environment.
  virtual void set_options(const std::string& json) = 0;
  // Starts new episodes. Returns observation leaves [E, ...].
  virtual ArrayNest reset(std::uint64_t seed) = 0;
  // Steps with action leaves [E, ...].
  virtual EnvStep step(const ArrayNest& action) = 0;
};

using EnvFactory = std::function<std::unique_ptr<Env>()>;

}  // namespace torchbeast
