// SPDX-License-Identifier: Apache-2.0
// Spreads the info of ended games over all environments.

#pragma once

#include <limits>
#include <optional>

#include "libtorchbeast/proto/description.h"

namespace torchbeast {

// Spreads the info of a step's ended games over all environments of the stream.
//
//   float32 [N, K] -> by keyword float32 [1, E], NaN where no game ended
//
// Returned arrays are never written to again. Without keywords the result is an empty map.
// Thread safety: every method may be called from any number of threads.
class InfoRows {
 public:
  explicit InfoRows(const EnvDescription& description)
      : keywords_(description.info_keywords), nowhere_(all_nan(description.num_envs)) {
    for (const std::string& keyword : keywords_) none_.emplace(keyword, ArrayNest(nowhere_));
  }

  // info: the checked info of the N environments with episode_end, in the order of the
  // environments; nullopt if no game ended. episode_end: bool [E].
  ArrayNest::Map operator()(const std::optional<Array>& info, const Array& episode_end) const {
    if (!info) return none_;
    ArrayNest::Map rows;
    for (std::size_t k = 0; k < keywords_.size(); ++k) {
      rows.emplace(keywords_[k], ArrayNest(row_of(*info, k, episode_end)));
    }
    return rows;
  }

 private:
  static Array all_nan(std::int64_t num_envs) {
    return Array::filled<float>({1, num_envs}, std::numeric_limits<float>::quiet_NaN());
  }

  Array row_of(const Array& info, std::size_t k, const Array& episode_end) const {
    Array row = nowhere_.clone();
    const float* number = info.as<float>() + k;
    for (std::int64_t e = 0; e < episode_end.size(0); ++e) {
      if (!episode_end.as<bool>()[e]) continue;
      row.as<float>()[e] = *number;
      number += keywords_.size();
    }
    return row;
  }

  const std::vector<std::string> keywords_;
  const Array nowhere_;  // float32 [1, E]
  ArrayNest::Map none_;  // by keyword, for a step in which no game ended
};

}  // namespace torchbeast
