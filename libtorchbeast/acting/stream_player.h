// SPDX-License-Identifier: Apache-2.0
// Plays a stream's connection: observe, infer, act, enqueue.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "libtorchbeast/acting/rollout_writer.h"
#include "libtorchbeast/acting/stage_clock.h"
#include "libtorchbeast/acting/stream_history.h"
#include "libtorchbeast/batching/dynamic_batcher.h"
#include "libtorchbeast/batching/rollout_queue.h"
#include "libtorchbeast/stream/env_stream.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// A stream while it is played, over all its connections.
//
// Thread safety: its thread; any thread may read the clock.
struct PlayedStream {
  const std::int64_t number;
  const Endpoint endpoint;
  StreamHistory history;
  std::optional<EnvDescription> described = {};  // by the first connection that came up
  std::int64_t options_version = 0;              // of the options that its connection has
  StageClock clock = {};
};

// A std::bad_alloc that says where.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& message) : message_(message) {}
  const char* what() const noexcept override { return message_.what(); }

 private:
  std::runtime_error message_;  // unlike std::string it is copied without an allocation
};

struct StreamPlayerOptions {
  std::int64_t unroll_length;    // see ActorPoolOptions
  std::int64_t rollout_columns;  // the same
  double max_rollout_bytes;      // the same
};

// Plays connections from their first step to their end, and enqueues rollouts.
//
//   EnvStream <-> play() -> RolloutWriter -> RolloutQueue
//                  |  ^
//                  v  |
//           DynamicBatcher::compute
//
// Thread safety: the threads of all streams call play() and give_options(); any thread may call the
// other methods. A step takes a lock of the player only after set_env_options().
class StreamPlayer {
 public:
  // Throws std::invalid_argument if an option makes no sense.
  StreamPlayer(StreamPlayerOptions options, std::shared_ptr<RolloutQueue> learner_queue,
               std::shared_ptr<DynamicBatcher> inference_batcher, ArrayNest initial_agent_state);

  // Plays a connection from its first step on, until an exception ends it: ClosedBatchingQueue
  // after queue or batcher are closed, and then the connection has been closed; what
  // EnvStream::step() and RolloutWriter throw; AsyncError or TimeoutError of inference; or
  // OutOfMemory. Errors that do not name the server name the stream and the server.
  [[noreturn]] void play(EnvStream* connection, PlayedStream* stream, StreamStep first);

  // Sets what give_options() gives.
  void set_env_options(std::string json) EXCLUDES(mutex_);
  // Gives a connection the options for its environments' resets, unless it has them.
  void give_options(EnvStream* connection, PlayedStream* stream) EXCLUDES(mutex_);

  // Environment steps in rollouts that were enqueued.
  std::int64_t count() const { return count_; }
  // All environment steps so far.
  std::int64_t steps() const { return steps_; }

 private:
  [[noreturn]] void step_until_stopped(EnvStream* connection, PlayedStream* stream,
                                       StreamStep step);
  Answer ask(const StreamStep& step, const ArrayNest& agent_state);
  void hand_over(std::vector<QueueItem> items, std::int64_t columns);

  const StreamPlayerOptions options_;
  const std::shared_ptr<RolloutQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const ArrayNest initial_agent_state_;  // of one environment, leaves [layers, 1, ...]
  std::atomic<std::int64_t> count_ = 0;
  std::atomic<std::int64_t> steps_ = 0;
  std::atomic<std::int64_t> options_version_ = 0;  // counts calls of set_env_options
  Mutex mutex_;
  std::string env_options_ GUARDED_BY(mutex_);
};

}  // namespace torchbeast
