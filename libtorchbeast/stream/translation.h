// SPDX-License-Identifier: Apache-2.0
// Converts a server's step to what actor and learner see.

#pragma once

#include <optional>

#include "libtorchbeast/proto/description.h"
#include "libtorchbeast/stream/frame_stack.h"
#include "libtorchbeast/stream/info_rows.h"
#include "libtorchbeast/stream/step_check.h"
#include "libtorchbeast/stream/wire.h"

namespace torchbeast {

// One step of a stream's E environments, as actor and learner see it: leaves [1, E, ...], with
// stacked frames.
struct StreamStep {
  ArrayNest observation;
  Array reward;                                     // float32 [1, E]
  Array done;                                       // bool [1, E]: terminated or truncated
  Array episode_step;                               // int32 [1, E]
  Array episode_return;                             // float32 [1, E]
  Array terminated;                                 // bool [1, E]
  Array truncated;                                  // bool [1, E]
  Array episode_end;                                // bool [1, E]
  std::optional<ArrayNest> final_observation = {};  // leaves [K, ...]: of truncated ones
  ArrayNest::Map info = {};                         // float32 [1, E] by keyword, see InfoRows
};

// Returns the environments' part of a step, as inference and rollouts have it.
inline ArrayNest env_output(const StreamStep& step) {
  return ArrayNest(ArrayNest::Vector{step.observation, ArrayNest(step.reward), ArrayNest(step.done),
                                     ArrayNest(step.episode_step), ArrayNest(step.episode_return)});
}

// Checks a server's steps and converts them to what actor and learner see.
//
//   RawStep -> StepCheck -> FrameStack -> StreamStep     throws std::invalid_argument for a bad one
//
// Thread safety: one thread at a time.
class StepTranslation {
 public:
  explicit StepTranslation(const EnvDescription& description)
      : num_envs_(description.num_envs),
        check_(description),
        stack_(description.frame_stack),
        info_(description) {}

  StreamStep operator()(const RawStep& raw) {
    check_(raw);
    StreamStep step{.observation = {},
                    .reward = batched(raw.reward),
                    .done = either(raw.terminated, raw.truncated),
                    .episode_step = batched(raw.episode_step),
                    .episode_return = batched(raw.episode_return),
                    .terminated = batched(raw.terminated),
                    .truncated = batched(raw.truncated),
                    .episode_end = batched(raw.episode_end)};
    if (raw.final_observation) {
      step.final_observation = stack_.with_finals(*raw.final_observation, raw.truncated);
    }
    step.info = info_(raw.info, raw.episode_end);
    step.observation =
        with_leading(stack_.push(raw.observation, step.done.reshaped({num_envs_})), 1);
    return step;
  }

 private:
  static Array batched(const Array& array) { return array.reshaped({1, array.size(0)}); }

  static Array either(const Array& a, const Array& b) {
    Array result(DType::kBool, {1, a.size(0)});
    for (std::int64_t e = 0; e < a.size(0); ++e) {
      result.as<bool>()[e] = a.as<bool>()[e] || b.as<bool>()[e];
    }
    return result;
  }

  const std::int64_t num_envs_;
  const StepCheck check_;
  FrameStack stack_;
  const InfoRows info_;
};

}  // namespace torchbeast
