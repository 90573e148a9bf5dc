// SPDX-License-Identifier: Apache-2.0
// Collects rollouts from all streams: observe, infer, act, enqueue.

#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "libtorchbeast/acting/backoff.h"
#include "libtorchbeast/acting/stage_clock.h"
#include "libtorchbeast/batching/dynamic_batcher.h"
#include "libtorchbeast/batching/rollout_queue.h"
#include "libtorchbeast/stream/env_stream.h"

namespace torchbeast {

struct ActorPoolOptions {
  std::int64_t unroll_length = 80;   // T, in agent steps
  std::vector<Endpoint> endpoints;   // one stream for each entry
  std::int64_t rollout_columns = 0;  // environments per item; 0: all of a stream's
  std::uint64_t seed = 0;            // every stream derives its own from it
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(1);    // see below
  std::chrono::milliseconds step_timeout = std::chrono::minutes(10);      // of one step
  std::chrono::milliseconds reconnect_timeout = std::chrono::minutes(1);  // see below
  // Consecutive connections of one stream without a single rollout that end the run.
  int fruitless_connections = 10;
};

// A stream that is lost and not connected again yet.
struct AwayStream {
  std::string address;
  Clock::duration away;  // since it was lost
};

// Collects rollouts from all streams and enqueues them for the learner.
//
//   environment server <-> EnvStream <-> thread of the stream -> RolloutWriter -> RolloutQueue
//                                             |        ^
//                                             v        |
//                                          DynamicBatcher::compute
//
// At the start, each server must become reachable within connect_timeout; a connection lost before
// its first step is retried within that time. Later, a lost stream reconnects with growing pauses;
// its unfinished rollout is dropped and its environments start new episodes. The server must then
// serve the same as before: anything else ends the run. The numbers of its
// rollouts continue with one left out: no two rollouts of an environment share a number, and two
// with successive numbers have no gap between them. The loss ends the run only once the stream has
// been away for reconnect_timeout and fewer than half of the streams are connected. A stream that
// keeps connecting but is lost each time before it completes a rollout has a broken server, which
// ends the run too.
//
// Thread safety: one thread calls run(), once; any thread may call the other methods.
// Closing: closing the queue or the batcher ends run(). The first failure that reconnecting cannot
// fix closes both, and run() throws it; the message names the server's address. Either way streams
// have 250 ms to end cleanly. Then their calls are cancelled, and so are the computations that the
// batcher has handed out and nobody has answered.
class ActorPool {
 public:
  ActorPool(ActorPoolOptions options, std::shared_ptr<RolloutQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, ArrayNest initial_agent_state);

  // Blocks until queue or batcher are closed. `poll` is called about ten times a second in this
  // thread; an exception from it ends the run and is rethrown. Throws ConnectionError,
  // TimeoutError, std::invalid_argument, EnvironmentFailure or AsyncError.
  void run(const std::function<void()>& poll = [] {});

  // Ends run() by closing queue and batcher, without waiting. May be called at any time.
  void stop() EXCLUDES(mutex_);

  // Environment steps in rollouts that were enqueued.
  std::int64_t count() const { return count_; }
  // All environment steps so far, including those of unfinished and dropped rollouts.
  std::int64_t steps() const { return steps_; }
  // Streams that are connected and have sent their first step.
  std::int64_t live_streams() const { return live_; }
  // The number of times that a stream was lost.
  std::int64_t lost_streams() const { return lost_; }
  // Streams that are lost at this moment.
  std::vector<AwayStream> away_streams() const;
  // The time of all streams together since run() began, by stage.
  StageTimes times() const;

 private:
  // Registers a stream for cancellation with the pool, for a scope.
  class Registration {
   public:
    Registration(ActorPool* pool, EnvStream* stream);
    ~Registration();
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

   private:
    ActorPool* pool_;
    EnvStream* stream_;
  };

  // One connection of a stream, and what it achieved.
  struct Connection {
    std::uint64_t attempt = 0;
    std::chrono::milliseconds timeout{};  // for connecting
    std::int64_t first_rollout = 0;       // the number of its first rollout
    bool came_up = false;                 // brought a first step
    std::int64_t rollouts = 0;            // completed
  };

  // A stream's connections so far.
  struct History {
    explicit History(std::uint64_t seed);

    bool came_up = false;                          // ever
    std::optional<EnvDescription> described = {};  // by the first connection that came up
    Clock::time_point away_since = Clock::now();
    int fruitless = 0;              // consecutive connections without a rollout
    std::int64_t next_rollout = 0;  // the number of the next connection's first rollout
    Backoff backoff;
    std::chrono::milliseconds pause{};  // before the next one
  };

  void run_stream(std::size_t index) noexcept;
  void keep_playing(std::size_t index);
  std::chrono::milliseconds patience(const History& history) const;
  void judge(const LostStream& lost, const Connection& connection, History* history);
  void play(std::size_t index, Connection* connection, History* history);
  void step_until_stopped(EnvStream* stream, std::size_t index, StreamStep step,
                          Connection* connection);
  void hand_over(std::vector<QueueItem> items, std::int64_t columns);
  Answer ask(const StreamStep& step, const ArrayNest& agent_state);
  void pause_or_give_up(std::chrono::milliseconds pause) EXCLUDES(mutex_);
  bool enough_streams_live() const;
  void fail(std::exception_ptr failure) EXCLUDES(mutex_);
  bool closed() const;
  void watch(const std::function<void()>& poll) EXCLUDES(mutex_);
  void cancel_overdue_streams() EXCLUDES(mutex_);
  void cancel_until_ended() EXCLUDES(mutex_);

  const ActorPoolOptions options_;
  const std::shared_ptr<RolloutQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const ArrayNest initial_agent_state_;  // of one environment, leaves [layers, 1, ...]

  std::vector<StageClock> clocks_;  // one per stream
  std::atomic<std::int64_t> count_ = 0;
  std::atomic<std::int64_t> steps_ = 0;
  std::atomic<std::int64_t> live_ = 0;
  std::atomic<std::int64_t> lost_ = 0;
  std::vector<std::atomic<Clock::rep>> away_since_;  // of each stream; 0: not lost
  std::atomic<bool> ran_ = false;

  Mutex mutex_;
  CondVar changed_;  // a stream's thread ended, or the pool stops
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::size_t running_ GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  std::set<EnvStream*> streams_ GUARDED_BY(mutex_);  // to be cancelled when the pool ends
};

}  // namespace torchbeast
