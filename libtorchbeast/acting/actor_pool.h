// SPDX-License-Identifier: Apache-2.0
// Collects rollouts from all streams: observe, infer, act, enqueue.

#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "libtorchbeast/acting/rollout_writer.h"
#include "libtorchbeast/acting/shortage.h"
#include "libtorchbeast/acting/stage_clock.h"
#include "libtorchbeast/acting/stream_history.h"
#include "libtorchbeast/batching/dynamic_batcher.h"
#include "libtorchbeast/batching/rollout_queue.h"
#include "libtorchbeast/stream/env_stream.h"

namespace torchbeast {

struct ActorPoolOptions {
  std::int64_t unroll_length = 80;   // T, in agent steps
  std::vector<Endpoint> endpoints;   // one stream for each entry; hosts may join too
  std::int64_t rollout_columns = 0;  // environments per item; 0: all environments of a stream
  std::uint64_t seed = 0;            // every stream derives its own seed from it
  std::chrono::milliseconds step_timeout = std::chrono::minutes(10);  // of one step
  double max_rollout_bytes = kMaxRolloutBytes;  // see RolloutWriterOptions::max_bytes
  // The run ends when fewer streams are connected for reconnect_timeout, or when retired streams
  // leave fewer. 0: half of the pool's streams, but at least one.
  std::int64_t min_streams = 0;
  RetryOptions retries = {};
};

// A stream that is lost and has not reconnected yet.
struct AwayStream {
  std::string address;
  Clock::duration away;  // since it was lost
  std::string why;       // the error that ended its last connection; empty if nobody answers
};

// Collects rollouts from all streams and enqueues them for the learner.
//
//   server or host <-> EnvStream <-> thread of the stream -> RolloutWriter -> RolloutQueue
//                                             |        ^
//                                             v        |
//                                          DynamicBatcher::compute
//
// Streams of hosts may join and leave at any time. Each stream has a number that no other stream of
// the pool has ever had. The stream's environments are numbered from kMaxEnvsPerStream times this
// number, and its seeds derive from it. When a stream leaves, its unfinished rollout is dropped,
// and the pool does not wait for it.
//
// At the start, each server must become reachable within connect_timeout; a connection that is lost
// before its first step is retried within that time. Later, a lost stream reconnects after growing
// pauses; its unfinished rollout is dropped and its environments start new episodes. The server
// must then serve the same environments as before, or the run ends. When a stream reconnects, one
// rollout number is skipped: no two rollouts of an environment share a number, and there is no gap
// between two rollouts with consecutive numbers. A stream whose environments raise an exception, or
// take longer than step_timeout, gets new environments in the same way.
//
// A stream is retired, and not tried again, if its environments fail too often, or if its
// connections end again and again before their first rollout. But if it has never completed a
// rollout, the run ends instead, even after a single failure of its environments. The run also ends
// if too few streams are connected for too long, or left unretired; see min_streams.
//
// Thread safety: one thread calls run(), once; any thread may call the other methods.
// Closing: closing the queue or the batcher ends run(). The first failure that a new connection
// cannot fix closes both, and run() throws it with a message that names the server's address. In
// either case streams have 250 ms to end cleanly. Then their calls are cancelled, and so are the
// computations that the batcher has handed out and that have not been answered.
class ActorPool {
 public:
  using Report = std::function<void(const std::string&)>;

  ActorPool(ActorPoolOptions options, std::shared_ptr<RolloutQueue> learner_queue,
            std::shared_ptr<DynamicBatcher> inference_batcher, ArrayNest initial_agent_state);

  // Blocks until queue or batcher are closed. This thread calls `poll` about ten times a second,
  // and `report` with a message for each failure of environments that does not end the run. If one
  // of them throws an exception, the run ends and rethrows it. Throws ConnectionError,
  // TimeoutError, std::invalid_argument, EnvironmentFailure or AsyncError.
  void run(
      const std::function<void()>& poll = [] {}, const Report& report = [](const std::string&) {});

  // Ends run() by closing queue and batcher, without waiting. May be called at any time.
  void stop() EXCLUDES(mutex_);

  // Gives the environments of all streams options for their resets, a JSON object. Streams that
  // connect later get them before their first episode.
  void set_env_options(std::string json) EXCLUDES(mutex_);

  // Plays the stream of a host that has joined, in the calling thread, until it ends; then the
  // stream leaves the pool. Returns why it ended, or "" if the pool stops. Closing: as for run().
  std::string play_joined(EnvStream* connection) EXCLUDES(mutex_);

  // Environment steps in rollouts that were enqueued.
  std::int64_t count() const { return count_; }
  // All environment steps so far, including those of unfinished and dropped rollouts.
  std::int64_t steps() const { return steps_; }
  // Streams that are connected and have sent their first step.
  std::int64_t live_streams() const { return live_; }
  // The number of times that a stream was lost.
  std::int64_t lost_streams() const { return lost_; }
  // The number of times that a stream's environments failed and the stream got new ones.
  std::int64_t restarted_streams() const { return restarted_; }
  // Streams that are retired.
  std::int64_t retired_streams() const EXCLUDES(mutex_);
  // The number of streams, including retired ones.
  std::int64_t num_streams() const EXCLUDES(mutex_);
  // Streams that are lost at present.
  std::vector<AwayStream> away_streams() const EXCLUDES(mutex_);
  // Describes how too few streams are connected; run() ends unless enough of them connect in time.
  // Streams that are connecting for the first time count as connected. Returns nullopt if there are
  // enough, and once the pool has stopped.
  std::optional<TooFewStreams> shortage() EXCLUDES(mutex_);
  // The total time of all streams since run() began, by stage.
  StageTimes times() const EXCLUDES(mutex_);

 private:
  // Data that the thread of a stream uses.
  struct Stream {
    const std::int64_t number;
    const Endpoint endpoint;
    StageClock clock = {};
    std::atomic<Clock::rep> away_since = 0;  // 0: not lost
    std::int64_t options_version = 0;        // of the options that its connection has
  };

  // A stream of the pool. A stream of a host is removed once it has left.
  struct Member {
    std::unique_ptr<Stream> stream;
    std::thread thread = {};          // started and joined by run()
    EnvStream* connection = nullptr;  // to be cancelled
    std::string why_away = {};        // see AwayStream::why
    bool is_retired = false;
    bool has_started = false;
    bool has_ended = false;  // its thread has nothing left to do
    bool has_left = false;   // with its host
  };

  // Registers a stream's connection for cancellation, for a scope.
  class Registration {
   public:
    Registration(ActorPool* pool, const Stream& stream, EnvStream* connection);
    ~Registration();
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;

   private:
    ActorPool* pool_;
    const std::int64_t number_;
  };

  Stream* enrol(Endpoint endpoint) REQUIRES(mutex_);
  void run_stream(Stream* stream, const std::function<void()>& body) noexcept;
  void keep_playing(Stream* stream);
  template <typename Error>
  bool obey(const Verdict& verdict, const Error& error, Stream* stream,
            const StreamHistory& history);
  void note_end(Stream* stream, const Verdict& verdict, const std::exception& error, bool is_away)
      EXCLUDES(mutex_);
  template <typename Error>
  void retire(Stream* stream, const Verdict& verdict, const Error& error) EXCLUDES(mutex_);
  void play(Stream* stream, StreamHistory* history, std::optional<EnvDescription>* described);
  void play_first_to_last(EnvStream* connection, Stream* stream, StreamStep first,
                          StreamHistory* history);
  std::string play_once(EnvStream* connection, Stream* stream);
  std::string let_go(Stream* stream, const std::exception& error) EXCLUDES(mutex_);
  void step_until_stopped(EnvStream* connection, Stream* stream, StreamStep step,
                          StreamHistory* history);
  void hand_over(std::vector<QueueItem> items, std::int64_t columns);
  void give_options(EnvStream* connection, Stream* stream) EXCLUDES(mutex_);
  Answer ask(const StreamStep& step, const ArrayNest& agent_state);
  void pause(std::chrono::milliseconds pause) EXCLUDES(mutex_);
  void fail(std::exception_ptr failure) EXCLUDES(mutex_);
  bool closed() const;

  // Called by run().
  void watch(const std::function<void()>& poll, const Report& report) EXCLUDES(mutex_);
  void tell(const Report& report) EXCLUDES(mutex_);
  void start_new_streams() EXCLUDES(mutex_);
  void join_ended_streams() EXCLUDES(mutex_);
  void cancel_late_streams() EXCLUDES(mutex_);
  void check_enough_streams() EXCLUDES(mutex_);
  void cancel_until_ended() EXCLUDES(mutex_);

  // The number of streams of the pool; of those that are not retired; and of those that are neither
  // retired nor away.
  struct Strength {
    std::int64_t all = 0, unretired = 0, present = 0;
  };
  Strength strength() const REQUIRES(mutex_);
  std::int64_t needed(const Strength& strength) const;
  std::optional<TooFewStreams> note_shortage() REQUIRES(mutex_);

  const ActorPoolOptions options_;
  const std::shared_ptr<RolloutQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  const ArrayNest initial_agent_state_;  // of one environment, leaves [layers, 1, ...]

  std::atomic<std::int64_t> count_ = 0;
  std::atomic<std::int64_t> steps_ = 0;
  std::atomic<std::int64_t> live_ = 0;
  std::atomic<std::int64_t> lost_ = 0;
  std::atomic<std::int64_t> restarted_ = 0;
  std::atomic<bool> ran_ = false;
  std::atomic<std::int64_t> options_version_ = 0;  // counts calls of set_env_options

  mutable Mutex mutex_;
  CondVar changed_;  // a stream has ended, or the pool stops
  bool stopped_ GUARDED_BY(mutex_) = false;
  ShortageWatch shortage_watch_ GUARDED_BY(mutex_);
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  std::int64_t next_number_ GUARDED_BY(mutex_) = 0;
  std::map<std::int64_t, Member> members_ GUARDED_BY(mutex_);  // by number
  std::size_t running_ GUARDED_BY(mutex_) = 0;                 // threads that have not ended
  std::vector<std::string> reports_ GUARDED_BY(mutex_);
  std::string env_options_ GUARDED_BY(mutex_);
  std::string last_end_ GUARDED_BY(mutex_);   // the error that ended the most recent connection
  StageTimes past_times_ GUARDED_BY(mutex_);  // of streams that are gone
};

}  // namespace torchbeast
