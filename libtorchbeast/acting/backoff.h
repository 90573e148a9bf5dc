// SPDX-License-Identifier: Apache-2.0
// Pauses between attempts to connect.

#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <utility>

namespace torchbeast {

// Exponential backoff: pauses that double from `first` to `longest`. Each pause is shortened at
// random by up to half, so that streams that were lost together do not reconnect at the same
// moment.
//
// Thread safety: one thread.
class Backoff {
 public:
  using Duration = std::chrono::milliseconds;

  Backoff(Duration first, Duration longest, std::uint64_t seed)
      : first_(first), longest_(longest), next_(first), random_(seed) {}

  Duration next() {
    const Duration whole = std::exchange(next_, std::min(2 * next_, longest_));
    std::uniform_int_distribution<Duration::rep> shortened(whole.count() / 2, whole.count());
    return Duration(shortened(random_));
  }

  // Starts over with `first`.
  void restart() { next_ = first_; }

 private:
  const Duration first_, longest_;
  Duration next_;
  std::mt19937_64 random_;
};

}  // namespace torchbeast
