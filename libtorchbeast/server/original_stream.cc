// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/original_stream.h"

#include <algorithm>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/server/vector_stream.h"
#include "libtorchbeast/stream/frame_stack.h"

namespace torchbeast {
namespace {

// Returns whether a shape is [1, 1] followed by `rest`, or by anything if `rest` is null.
bool is_prefixed(const Shape& shape, const Shape* rest) {
  if (shape.size() < 2 || shape[0] != 1 || shape[1] != 1) return false;
  return rest == nullptr || std::equal(shape.begin() + 2, shape.end(), rest->begin(), rest->end());
}

// Converts actions of the original protocol to leaves [1, ...]. Learners send them with or without
// leading dimensions [1, 1]; the first action decides for the stream, see rpcenv.proto.
class OriginalActions {
 public:
  explicit OriginalActions(std::optional<std::vector<Shape>> shapes) : shapes_(std::move(shapes)) {}

  ArrayNest operator()(const ArrayNest& action) {
    if (!prefixed_) prefixed_ = all_prefixed(nest::flatten(action));
    if (!*prefixed_) return with_leading(action, 1);
    check_action(action, {1, 1});
    return without_leading(action, 1);
  }

 private:
  bool all_prefixed(const std::vector<Array>& leaves) const {
    if (shapes_ && shapes_->size() != leaves.size()) return false;
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      if (!is_prefixed(leaves[i].shape(), shapes_ ? &(*shapes_)[i] : nullptr)) return false;
    }
    return true;
  }

  const std::optional<std::vector<Shape>> shapes_;  // of one environment's action
  std::optional<bool> prefixed_;
};

// Serves one environment in the original protocol: whole stacks of frames, one `done`.
class OriginalStream {
 public:
  explicit OriginalStream(Env& env)
      : env_(env), actions_(env.action_shapes()), counters_(1), stack_(env.frame_stack()) {
    if (env.num_envs() != 1) {
      throw std::invalid_argument(
          "the original protocol carries one environment per stream, this server steps " +
          std::to_string(env.num_envs()) + " together; start it with one");
    }
  }

  // The protocol carries no seed, and every stream needs its own.
  void reset(rpcenv::Step* message) { fill(first_step(env_, std::random_device{}()), message); }

  void step(const rpcenv::Action& action, rpcenv::Step* message) {
    const EnvStep step = env_.step(actions_(codec::decode(action.nest_action())));
    counters_.add(step);
    fill(step, message);
    counters_.restart(step);
  }

 private:
  void fill(const EnvStep& step, rpcenv::Step* message) {
    const bool done = step.terminated.as<bool>()[0] || step.truncated.as<bool>()[0];
    const Array starts = Array::filled<bool>({1}, done);
    message->Clear();
    codec::encode(without_leading(stack_.push(step.observation, starts), 1),
                  message->mutable_observation());
    message->set_reward(step.reward.as<float>()[0]);
    message->set_done(done);
    message->set_episode_step(counters_.steps(step).as<std::int32_t>()[0]);
    message->set_episode_return(counters_.returns().as<float>()[0]);
  }

  Env& env_;
  OriginalActions actions_;
  EpisodeCounters counters_;
  FrameStack stack_;
};

}  // namespace

void stream_original(Env& env, OpenStream* open, Call* call) {
  OriginalStream original(env);
  rpcenv::Step step;
  original.reset(&step);
  rpcenv::Action action;
  while (call->write(step) && call->read(&action)) {
    original.step(action, &step);
    open->count(1);
  }
}

}  // namespace torchbeast
