// SPDX-License-Identifier: Apache-2.0
// Validates the steps that a server sends.

#pragma once

#include "libtorchbeast/proto/description.h"
#include "libtorchbeast/stream/wire.h"

namespace torchbeast {

// Compares every step of a stream with the server's description.
//
// A step passes when every array has the described dtype and shape, rewards are finite, no
// environment is both terminated and truncated, each truncated one has a final observation, and
// each game that ended has a number for each info keyword.
class StepCheck {
 public:
  explicit StepCheck(const EnvDescription& description);

  // Throws std::invalid_argument with a message that names the array and shows both sides.
  void operator()(const RawStep& raw) const;

 private:
  void check_array(const Array& array, DType dtype, const char* what) const;
  void check_rewards(const Array& reward) const;
  void check_ends(const RawStep& raw) const;
  void check_finals(const RawStep& raw) const;
  void check_info(const RawStep& raw) const;

  const std::int64_t num_envs_;
  const std::int64_t num_keywords_;
  const ArrayNest one_observation_;  // dtype and shape of each leaf, of one environment
  const ArrayNest observation_;      // dtype and shape of each leaf, [E, ...]
};

}  // namespace torchbeast
