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

#include "libtorchbeast/acting/stream_player.h"
#include "libtorchbeast/acting/stream_roster.h"

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

// Collects rollouts from all streams and enqueues them for the learner.
//
//   thread of a stream    EnvStream <-> StreamPlayer -> rollouts            a connection is played
//                             ^
//                             +-- again -- StreamHistory -> StreamRoster    it has ended
//   thread of run()                                              |
//                                 reports, too few streams <-----+          ten times a second
//
// The thread of a server's stream runs until the stream is retired; that of a host's stream is the
// caller of play_joined().
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
// Thread safety: one thread calls run(), once; any thread may call the other methods at any time.
// The pool's lock guards which streams are being played, and the end. The roster and the player
// have locks of their own; no thread holds two of the three.
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
  void set_env_options(std::string json) { player_.set_env_options(std::move(json)); }

  // Plays the stream of a host that has joined, in the calling thread, until it ends; then the
  // stream leaves the pool. Returns why it ended, or "" if the pool stops. Closing: as for run().
  std::string play_joined(EnvStream* connection) EXCLUDES(mutex_);

  // Environment steps in rollouts that were enqueued.
  std::int64_t count() const { return player_.count(); }
  // All environment steps so far, including those of unfinished and dropped rollouts.
  std::int64_t steps() const { return player_.steps(); }
  // Streams that are connected and have sent their first step.
  std::int64_t live_streams() const { return roster_.counts().live; }
  // The number of times that a stream was lost.
  std::int64_t lost_streams() const { return roster_.counts().lost; }
  // The number of times that a stream's environments failed and the stream got new ones.
  std::int64_t restarted_streams() const { return roster_.counts().restarted; }
  // Streams that are retired.
  std::int64_t retired_streams() const { return roster_.counts().retired; }
  // Streams that are lost at present.
  std::vector<AwayStream> away_streams() const { return roster_.away_streams(); }
  // Describes how too few streams are connected; run() ends unless enough of them connect in time.
  // Streams that are connecting for the first time count as connected. Returns nullopt if there are
  // enough, and once the pool has stopped.
  std::optional<TooFewStreams> shortage() EXCLUDES(mutex_);
  // The total time of all streams since run() began, by stage.
  StageTimes times() const EXCLUDES(mutex_);

 private:
  // The thread of a stream.
  void run_stream(PlayedStream* stream, const std::function<void()>& play) noexcept
      EXCLUDES(mutex_);
  void keep_playing(PlayedStream* stream);
  template <typename Error>
  bool obey(const Verdict& verdict, const Error& error, PlayedStream* stream);
  void pause(std::chrono::milliseconds pause) EXCLUDES(mutex_);
  void set_connection(PlayedStream* stream, EnvStream* connection) EXCLUDES(mutex_);
  void play_connection(PlayedStream* stream);
  void play_first_to_last(EnvStream* connection, PlayedStream* stream, StreamStep first);
  std::string play_once(EnvStream* connection, PlayedStream* stream);
  PlayedStream new_stream(std::int64_t number, Endpoint endpoint) const;
  std::uint64_t seed_of(const PlayedStream& stream, std::uint64_t connection) const;

  // The thread of run().
  void start_streams(std::vector<std::thread>* threads);
  void watch(const std::function<void()>& poll, const Report& report) EXCLUDES(mutex_);
  void tell(const Report& report);
  void cancel_late_streams() EXCLUDES(mutex_);
  void cancel_until_ended() EXCLUDES(mutex_);

  void fail(std::exception_ptr failure) EXCLUDES(mutex_);
  bool stopped() const EXCLUDES(mutex_);
  bool closed() const;

  const ActorPoolOptions options_;
  const std::shared_ptr<RolloutQueue> learner_queue_;
  const std::shared_ptr<DynamicBatcher> inference_batcher_;
  StreamPlayer player_;
  StreamRoster roster_;
  std::atomic<bool> ran_ = false;

  mutable Mutex mutex_;
  CondVar changed_;  // a stream has ended, or the pool stops
  bool stopped_ GUARDED_BY(mutex_) = false;
  std::exception_ptr failure_ GUARDED_BY(mutex_);
  // The streams that are being played. nullptr, or the connection, for other threads to cancel.
  std::map<PlayedStream*, EnvStream*> playing_ GUARDED_BY(mutex_);
  StageTimes past_times_ GUARDED_BY(mutex_);  // of streams that have ended
};

}  // namespace torchbeast
