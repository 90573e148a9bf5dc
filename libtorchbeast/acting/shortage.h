// SPDX-License-Identifier: Apache-2.0
// Measures how long too few streams have been connected.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// A shortage: fewer streams are connected than are needed.
struct TooFewStreams {
  std::int64_t connected, needed;
  Clock::duration left;  // until it has lasted for the limit; 0 once it has
};

// Measures how long too few streams have been connected, no matter which streams.
//
//   connected  2   1   1   2   1   1     2 are needed
//                  |       |   |
//            begins    ends    begins again
//
// Thread safety: one thread at a time.
class ShortageWatch {
 public:
  // limit: how long a shortage may last.
  explicit ShortageWatch(Clock::duration limit) : limit_(limit) {}

  // Records the number of streams that are connected and needed at a time that is not before the
  // previous one. Returns the shortage, if there is one.
  std::optional<TooFewStreams> note(std::int64_t connected, std::int64_t needed,
                                    Clock::time_point now) {
    if (connected >= needed) {
      since_.reset();
      return std::nullopt;
    }
    if (!since_) since_ = now;
    return TooFewStreams{connected, needed, std::max(Clock::duration(0), *since_ + limit_ - now)};
  }

 private:
  const Clock::duration limit_;
  std::optional<Clock::time_point> since_;
};

}  // namespace torchbeast
