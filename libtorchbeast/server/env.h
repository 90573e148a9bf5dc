// SPDX-License-Identifier: Apache-2.0
// What a server needs of an environment: E of them, described, reset and stepped together.

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

// What one step of E environments gives. Leaves and arrays are [E, ...].
struct EnvStep {
  ArrayNest observation;  // of the next episode where one ended
  Array reward;           // float32 [E]
  Array terminated;       // bool [E]
  Array truncated;        // bool [E]; never together with terminated
  Array episode_end;      // bool [E]; the whole game is over, not only a life
  std::optional<ArrayNest> final_observation = {};  // leaves [K, ...] of the K truncated ones
};

// E environments stepped together; an ended one restarts in the same step.
//
// Thread safety: one thread, its stream's, makes, uses and destroys it. What it throws ends the
// stream; EnvironmentFailure carries the environment's own traceback.
class Env {
 public:
  virtual ~Env() = default;
  virtual std::int64_t num_envs() const = 0;
  virtual std::int64_t frame_stack() const = 0;
  // JSON as in rpcenv.proto; empty when it cannot be told.
  virtual std::string action_space() const = 0;
  // Shapes of one environment's action, leaf by leaf in the order of nests; none when unknown.
  virtual std::optional<std::vector<Shape>> action_shapes() const { return std::nullopt; }
  // Observation leaves [E, ...].
  virtual ArrayNest reset(std::uint64_t seed) = 0;
  // Action leaves [E, ...].
  virtual EnvStep step(const ArrayNest& action) = 0;
};

using EnvFactory = std::function<std::unique_ptr<Env>()>;

}  // namespace torchbeast
