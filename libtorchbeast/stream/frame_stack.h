// SPDX-License-Identifier: Apache-2.0
// Rebuilds stacks of frames from the newest frames, because servers send only these.

#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "libtorchbeast/memory/array_ops.h"

namespace torchbeast {

// The newest k frames of each of E environments, oldest first.
//
//   push([E, C, ...]) -> [E, k * C, ...]        the first frame of an episode fills its stack
//
// Arrays that push() has returned are never written to again. With k = 1 nothing is copied.
// Thread safety: one thread at a time.
class FrameStack {
 public:
  explicit FrameStack(std::int64_t num_frames) : num_frames_(num_frames) {}

  // Adds a frame to every stack and returns the stacks. starts: bool [E], true if the frame is the
  // first one of an episode.
  ArrayNest push(const ArrayNest& frames, const Array& starts) {
    if (num_frames_ == 1) return frames;
    const std::vector<Array> leaves = nest::flatten(frames);
    stacks_.resize(leaves.size());  // empty arrays at first
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      stacks_[i] = pushed(leaves[i], starts, stacks_[i]);
    }
    return nest::pack_as(frames, stacks_);
  }

  // Returns the final stacks of truncated episodes. Call it before push().
  // finals: leaves [K, C, ...], the last frames of the K environments that were truncated.
  // truncated: bool [E].
  ArrayNest with_finals(const ArrayNest& finals, const Array& truncated) const {
    if (num_frames_ == 1) return finals;
    if (stacks_.empty()) {
      throw std::invalid_argument(
          "a final observation came before the first observation of its episode");
    }
    std::vector<Array> stacked;
    for (const Array& leaf : nest::flatten(finals)) {
      stacked.push_back(final_stack(leaf, truncated, stacks_.at(stacked.size())));
    }
    return nest::pack_as(finals, stacked);
  }

 private:
  Shape stacked_shape(const Array& frames) const {
    if (frames.ndim() < 2) {
      throw std::invalid_argument("frames to be stacked need a channel dimension, got shape " +
                                  to_string(frames.shape()));
    }
    Shape shape = frames.shape();
    shape[1] *= num_frames_;
    return shape;
  }

  static std::size_t row_bytes(const Array& array) {
    return array.size(0) == 0 ? 0 : array.num_bytes() / static_cast<std::size_t>(array.size(0));
  }

  // Writes the newest k - 1 frames of `from`, then `frame`, to `to`.
  void shift_in(const std::byte* from, const std::byte* frame, std::size_t frame_bytes,
                std::byte* to) const {
    const std::size_t kept = frame_bytes * static_cast<std::size_t>(num_frames_ - 1);
    std::memcpy(to, from + frame_bytes, kept);
    std::memcpy(to + kept, frame, frame_bytes);
  }

  void fill(const std::byte* frame, std::size_t frame_bytes, std::byte* to) const {
    for (std::int64_t k = 0; k < num_frames_; ++k, to += frame_bytes) {
      std::memcpy(to, frame, frame_bytes);
    }
  }

  Array pushed(const Array& frames, const Array& starts, const Array& before) const {
    Array after(frames.dtype(), stacked_shape(frames));
    const std::size_t bytes = row_bytes(frames);
    const std::size_t stack_bytes = bytes * static_cast<std::size_t>(num_frames_);
    for (std::size_t e = 0; e < static_cast<std::size_t>(frames.size(0)); ++e) {
      const std::byte* frame = frames.data() + e * bytes;
      std::byte* to = after.data() + e * stack_bytes;
      if (starts.as<bool>()[e] || before.num_bytes() == 0) {
        fill(frame, bytes, to);
      } else {
        shift_in(before.data() + e * stack_bytes, frame, bytes, to);
      }
    }
    return after;
  }

  Array final_stack(const Array& finals, const Array& truncated, const Array& stack) const {
    Array stacked(finals.dtype(), stacked_shape(finals));
    const std::size_t bytes = row_bytes(finals);
    const std::size_t stack_bytes = bytes * static_cast<std::size_t>(num_frames_);
    std::size_t k = 0;
    for (std::int64_t e = 0; e < truncated.size(0); ++e) {
      if (!truncated.as<bool>()[e]) continue;
      shift_in(stack.data() + static_cast<std::size_t>(e) * stack_bytes, finals.data() + k * bytes,
               bytes, stacked.data() + k * stack_bytes);
      ++k;
    }
    return stacked;
  }

  const std::int64_t num_frames_;
  std::vector<Array> stacks_;  // by leaf, [E, k * C, ...]
};

}  // namespace torchbeast
