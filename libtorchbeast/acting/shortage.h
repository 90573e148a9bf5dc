// SPDX-License-Identifier: Apache-2.0
// How long too few streams have been connected.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// Fewer streams are connected than are needed.
struct Shortage {
  std::int64_t connected, needed;
  Clock::duration left;  // until it has lasted as long as it may; 0: it has
};

// Says since when too few streams are connected, whichever they are.
//
//   connected  2   1   1   2   1   1     2 are needed
//                  |       |   |
//            begins    ends    begins anew
//
// Thread safety: one thread at a time.
class ShortageWatch {
 public:
  // limit: how long a shortage may last.
  explicit ShortageWatch(Clock::duration limit) : limit_(limit) {}

  // Notes how many are connected, and needed, at a time no earlier than the last. Returns the
  // shortage, if that is one.
  std::optional<Shortage> note(std::int64_t connected, std::int64_t needed, Clock::time_point now) {
    if (connected >= needed) {
      since_.reset();
      return std::nullopt;
    }
    if (!since_) since_ = now;
    return Shortage{connected, needed, std::max(Clock::duration(0), *since_ + limit_ - now)};
  }

 private:
  const Clock::duration limit_;
  std::optional<Clock::time_point> since_;
};

}  // namespace torchbeast
