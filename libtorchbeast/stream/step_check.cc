// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/step_check.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "libtorchbeast/batching/input_check.h"

namespace torchbeast {
namespace {

// Describes the leaves of `rows` environments, given those of one.
ArrayNest with_rows(std::int64_t rows, const ArrayNest& one) {
  return nest::map(
      [rows](const Array& leaf) {
        Shape shape{rows};
        shape.insert(shape.end(), leaf.shape().begin(), leaf.shape().end());
        return Array::spec(leaf.dtype(), shape);
      },
      one);
}

void check_like(const ArrayNest& expected, const ArrayNest& got, const char* what) {
  try {
    nest::for_each2_with_path(
        [](const nest::Path& path, const Array& wanted, const Array& came) {
          if (wanted.dtype() == came.dtype() && wanted.shape() == came.shape()) return;
          throw std::invalid_argument("expected " + summary(wanted) + " at " + path.str() +
                                      " as before, got " + summary(came));
        },
        expected, got);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(std::string(what) + " of a step: " + error.what());
  }
}

template <typename Float>
bool is_finite(const Array& leaf) {
  const Float* values = reinterpret_cast<const Float*>(leaf.data());
  bool finite = true;  // without a branch, so that it is vectorised
  for (std::int64_t i = 0; i < leaf.num_elements(); ++i) finite &= std::isfinite(values[i]);
  return finite;
}

// float16, as its bits: NaN and infinity have the largest exponent.
bool is_finite_half(const Array& leaf) {
  const std::uint16_t* bits = reinterpret_cast<const std::uint16_t*>(leaf.data());
  return std::none_of(bits, bits + leaf.num_elements(),
                      [](std::uint16_t half) { return (half & 0x7c00) == 0x7c00; });
}

void check_finite(const ArrayNest& nest, const char* what) {
  nest::for_each_with_path(
      [what](const nest::Path& path, const Array& leaf) {
        if ((leaf.dtype() == DType::kFloat16 && !is_finite_half(leaf)) ||
            (leaf.dtype() == DType::kFloat32 && !is_finite<float>(leaf)) ||
            (leaf.dtype() == DType::kFloat64 && !is_finite<double>(leaf))) {
          throw std::invalid_argument(std::string(what) +
                                      " of a step: expected finite numbers at " + path.str() +
                                      ", got NaN or infinity");
        }
      },
      nest);
}

}  // namespace

StepCheck::StepCheck(const EnvDescription& description)
    : num_envs_(description.num_envs),
      num_keywords_(static_cast<std::int64_t>(description.info_keywords.size())),
      one_observation_(description.observation),
      observation_(with_rows(description.num_envs, description.observation)) {}

void StepCheck::operator()(const RawStep& raw) const {
  check_like(observation_, raw.observation, "observation");
  check_array(raw.reward, DType::kFloat32, "reward");
  check_array(raw.terminated, DType::kBool, "terminated");
  check_array(raw.truncated, DType::kBool, "truncated");
  check_array(raw.episode_end, DType::kBool, "episode_end");
  check_array(raw.episode_step, DType::kInt32, "episode_step");
  check_array(raw.episode_return, DType::kFloat32, "episode_return");
  check_rewards(raw.reward);
  check_finite(raw.observation, "observation");
  check_finite(raw.episode_return, "episode_return");
  check_ends(raw);
  check_finals(raw);
  check_info(raw);
}

void StepCheck::check_array(const Array& array, DType dtype, const char* what) const {
  if (array.dtype() == dtype && array.shape() == Shape{num_envs_}) return;
  throw std::invalid_argument(std::string(what) + " of a step: expected " +
                              summary(Array::spec(dtype, {num_envs_})) + ", got " + summary(array));
}

void StepCheck::check_rewards(const Array& reward) const {
  for (std::int64_t e = 0; e < num_envs_; ++e) {
    if (std::isfinite(reward.as<float>()[e])) continue;
    throw std::invalid_argument("reward of environment " + std::to_string(e) +
                                " must be a finite number, got " +
                                std::to_string(reward.as<float>()[e]));
  }
}

void StepCheck::check_ends(const RawStep& raw) const {
  for (std::int64_t e = 0; e < num_envs_; ++e) {
    if (!raw.terminated.as<bool>()[e] || !raw.truncated.as<bool>()[e]) continue;
    throw std::invalid_argument("environment " + std::to_string(e) +
                                " is both terminated and truncated; expected at most one of them");
  }
}

void StepCheck::check_finals(const RawStep& raw) const {
  const bool* truncated = raw.truncated.as<bool>();
  const std::int64_t count = std::count(truncated, truncated + num_envs_, true);
  if (raw.final_observation) {
    const ArrayNest expected = with_rows(count, one_observation_);
    check_like(expected, *raw.final_observation, "final observation");
    check_finite(*raw.final_observation, "final observation");
  } else if (count > 0) {
    throw std::invalid_argument(std::to_string(count) +
                                " environments were truncated, but the step carries no final "
                                "observation");
  }
}

void StepCheck::check_info(const RawStep& raw) const {
  const bool* ended = raw.episode_end.as<bool>();
  const std::int64_t games = std::count(ended, ended + num_envs_, true);
  const Array expected = Array::spec(DType::kFloat32, {games, num_keywords_});
  if (!raw.info) {
    if (games == 0 || num_keywords_ == 0) return;
    throw std::invalid_argument("info of a step in which " + std::to_string(games) +
                                " games ended: expected " + summary(expected) + ", got none");
  }
  if (raw.info->dtype() == expected.dtype() && raw.info->shape() == expected.shape()) return;
  throw std::invalid_argument("info of a step in which " + std::to_string(games) +
                              " games ended: expected " + summary(expected) + ", got " +
                              summary(*raw.info));
}

}  // namespace torchbeast
