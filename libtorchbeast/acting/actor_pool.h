// SPDX-License-Identifier: Apache-2.0
// Observe, ask for actions, act, hand over rollouts; for all streams.

#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "libtorchbeast/acting/stage_clock.h"
#include "libtorchbeast/batching/dynamic_batcher.h"
#include "libtorchbeast/batching/rollout_queue.h"
#include "libtorchbeast/stream/env_stream.h"

namespace torchbeast {

struct ActorPoolOptions {
  std::int64_t unroll_length = 80;   // T, agent steps
  std::vector<Endpoint> endpoints;   // one stream for each entry
  std::int64_t rollout_columns = 0;  // environments in one item; 0: all of a stream's
  std::uint64_t seed = 0;            // of the pool; every stream derives its own
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(1);    // see below
  std::chrono::milliseconds step_timeout = std::chrono::minutes(10);      // of one step
  std::chrono::milliseconds reconnect_timeout = std::chrono::minutes(1);  // see below
  int fruitless_connections = 10;  // in a row, of one stream, that end the run
};

// A stream that was lost.
struct AwayStream {
  std::string address;
  Clock::duration away;  // since it was lost
};

// Plays all streams and hands their rollouts to the learner.
//
//   environment server <-> EnvStream <-> thread of the stream -> RolloutWriter -> RolloutQueue
//                                             |        ^
//                                             v        |
//                                          DynamicBatcher::compute
//
// A server has connect_timeout to be there at the start; a connection that is lost before its first
// step is tried again within that time. A lost stream reconnects with growing pauses; its
// unfinished rollout is dropped, its environments start new episodes. Only when it has been away
// for reconnect_timeout and fewer than half of the streams live does the loss end the run. A stream
// that comes up again and again and is lost before it has handed over anything is no lost
// connection but a broken server: that ends the run too.
//
// Thread safety: run() once, in one thread; the counters from any.
// Closing: closing the queue or the batcher ends run(). The first failure of a stream that
// reconnecting does not mend closes both, and run() throws it, with its address. Either way streams
// have a quarter of a second to end in order; then their calls are cancelled, and so are the
// questions that the batcher has handed out and nobody has answered.
class ActorPool {
 public:
  ActorPool(ActorPoolOptions options, std::shared_ptr<RolloutQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, ArrayNest initial_agent_state);

  // Blocks. `poll` is called about ten times a second in this thread; what it throws ends the run.
  // Throws ConnectionError, TimeoutError, std::invalid_argument, EnvironmentFailure or AsyncError.
  void run(const std::function<void()>& poll = [] {});

  // Closes queue and batcher and so ends run(). Does not wait for it. May be called at any time.
  void stop() EXCLUDES(mutex_);

  // Environment steps in rollouts that were handed over.
  std::int64_t count() const { return count_; }
  // Environment steps until now, those of unfinished and of dropped rollouts included.
  std::int64_t steps() const { return steps_; }
  std::int64_t live_streams() const { return live_; }
  // How often a stream was lost so far.
  std::int64_t lost_streams() const { return lost_; }
  // The streams that were lost and are not connected again yet.
  std::vector<AwayStream> away_streams() const;
  // What all streams together have spent their time on since run() began.
  StageTimes times() const;

 private:
  // Has a stream cancelled with the pool for a scope.
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

  // What came of one connection of a stream.
  struct Connection {
    std::uint64_t attempt = 0;
    std::chrono::milliseconds timeout{};  // for its server to be there
    bool came_up = false;
    bool was_fruitful = false;  // handed over a rollout
  };

  // A stream's connections so far.
  struct History {
    bool came_up = false;  // ever
    Clock::time_point away_since = Clock::now();
    int fruitless = 0;                  // connections in a row
    std::chrono::milliseconds pause{};  // before the next one
  };

  void run_stream(std::size_t index) noexcept;
  void keep_playing(std::size_t index);
  std::chrono::milliseconds patience(const History& history) const;
  void judge(const LostStream& lost, const Connection& connection, History* history);
  void play(std::size_t index, Connection* connection);
  void step_until_stopped(EnvStream* stream, std::size_t index, StreamStep step, bool* fruitful);
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

  std::vector<StageClock> clocks_;  // one a stream
  std::atomic<std::int64_t> count_ = 0;
  std::atomic<std::int64_t> steps_ = 0;
  std::atomic<std::int64_t> live_ = 0;
  std::atomic<std::int64_t> lost_ = 0;
  std::vector<std::atomic<Clock::rep>> away_since_;  // of each stream; 0: not lost, or back
  std::atomic<bool> ran_ = false;

  Mutex mutex_;
  CondVar changed_;  // a stream's thread ended, or the pool stops
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::size_t running_ GUARDED_BY(mutex_) = 0;
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  std::set<EnvStream*> streams_ GUARDED_BY(mutex_);  // those that may have to be cancelled
};

}  // namespace torchbeast
