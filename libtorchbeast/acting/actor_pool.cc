// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/actor_pool.h"

#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <utility>

#include "libtorchbeast/support/finally.h"
#include "libtorchbeast/support/thread.h"

namespace torchbeast {
namespace {

// In place of the number of a connection: the seed of a stream's pauses.
constexpr std::uint64_t kPauses = std::numeric_limits<std::uint64_t>::max() - 1;
// How long streams have to end cleanly before they are cancelled.
constexpr auto kGrace = std::chrono::milliseconds(250);

// Derives a distinct seed for each connection of each stream, with the finaliser of splitmix64. It
// stays below 2^63, so that it is positive in every language.
std::uint64_t derived_seed(std::uint64_t seed, std::uint64_t stream, std::uint64_t attempt) {
  std::uint64_t z = seed;
  for (const std::uint64_t part : {stream, attempt}) {
    z += 0x9e3779b97f4a7c15ULL * (part + 1);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    z ^= z >> 31;
  }
  return z >> 1;
}

}  // namespace

ActorPool::ActorPool(ActorPoolOptions options, std::shared_ptr<RolloutQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     ArrayNest initial_agent_state)
    : options_(std::move(options)),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      player_({.unroll_length = options_.unroll_length,
               .rollout_columns = options_.rollout_columns,
               .max_rollout_bytes = options_.max_rollout_bytes},
              learner_queue_, inference_batcher_, std::move(initial_agent_state)),
      roster_(options_.min_streams, options_.retries) {
  if (learner_queue_ == nullptr) throw std::invalid_argument("learner_queue must not be None");
  if (inference_batcher_ == nullptr) {
    throw std::invalid_argument("inference_batcher must not be None");
  }
  const auto count = static_cast<std::int64_t>(options_.endpoints.size());
  if (options_.min_streams < 0 || (count > 0 && options_.min_streams > count)) {
    throw std::invalid_argument("min_streams must be at most the number of streams, " +
                                std::to_string(count) + ", got " +
                                std::to_string(options_.min_streams));
  }
  for (const Endpoint& endpoint : options_.endpoints) roster_.add(endpoint.address);
}

void ActorPool::run(const std::function<void()>& poll, const Report& report) {
  if (ran_.exchange(true)) throw std::runtime_error("ActorPool.run() may be called once only");
  std::vector<std::thread> threads;
  try {
    if (!closed()) start_streams(&threads);
    watch(poll, report);
  } catch (...) {  // threads must be joined even if poll(), or starting one of them, throws
    fail(std::current_exception());
  }
  cancel_until_ended();
  for (std::thread& thread : threads) thread.join();
  try {
    tell(report);
  } catch (...) {
    fail(std::current_exception());
  }
  // Not kept, because a Python exception holds the frames of the caller, and those hold the pool.
  std::exception_ptr failure;
  {
    MutexLock lock(mutex_);
    failure = std::exchange(failure_, nullptr);
  }
  if (failure) std::rethrow_exception(failure);
}

// ---- The thread of a stream -----------------------------------------------------------------

// Calls `play` until the stream ends, unless the pool has stopped. Once the stream is no longer
// among those that are being played, the pool may be gone.
void ActorPool::run_stream(PlayedStream* stream, const std::function<void()>& play) noexcept {
  try {
    {
      MutexLock lock(mutex_);
      if (stopped_) return;
      playing_.emplace(stream, nullptr);
    }
    play();
  } catch (const ClosedBatchingQueue&) {  // the normal end
    stop();
  } catch (const StreamCancelled&) {  // the pool is stopping already
    stop();
  } catch (...) {
    fail(std::current_exception());
  }
  stream->clock.enter(Stage::kNone);
  MutexLock lock(mutex_);
  past_times_ += stream->clock.times();
  playing_.erase(stream);
  changed_.notify_all();
}

// Plays one stream until the pool stops, and connects again if the stream is lost or its
// environments fail. Returns if the stream is retired.
void ActorPool::keep_playing(PlayedStream* stream) {
  StreamHistory& history = stream->history;
  for (bool goes_on = true; goes_on;) {
    try {
      play_connection(stream);
    } catch (const LostStream& error) {
      if (closed()) throw ClosedBatchingQueue("the pool stopped");  // the loss no longer matters
      if (history.is_up()) roster_.count_loss();
      goes_on = obey(history.lost(), error, stream);
    } catch (const EnvironmentFailure& error) {
      goes_on = obey(history.failed(), error, stream);
    } catch (const Unresponsive& error) {
      goes_on = obey(history.failed(), error, stream);
    }
  }
}

// Does what follows a connection that ended with this error: waits for the next one, retires the
// stream and returns false, or throws the error, which ends the run.
template <typename Error>
bool ActorPool::obey(const Verdict& verdict, const Error& error, PlayedStream* stream) {
  const std::string message = error.what() + verdict.why;
  if (verdict.next == Verdict::Next::kEndRun) throw Error(message);
  if (verdict.next == Verdict::Next::kRetire) {
    const auto too_few = roster_.retire(stream->number, message, verdict.failures);
    if (too_few) throw Error(*too_few);
    return false;
  }
  roster_.connects_again(stream->number, error, stream->history.may_be_away(), verdict.failures);
  stream->clock.enter(Stage::kEnvironment);
  pause(stream->history.pause());
  return true;
}

// Waits before the next connection. Throws ClosedBatchingQueue if the pool stops meanwhile.
void ActorPool::pause(std::chrono::milliseconds pause) {
  const auto until = Clock::now() + pause;
  MutexLock lock(mutex_);
  while (!stopped_ && Clock::now() < until) changed_.wait_until(mutex_, until);
  if (stopped_) throw ClosedBatchingQueue("the pool stopped");
}

// Lets other threads cancel the connection of a stream; nullptr: it has none.
void ActorPool::set_connection(PlayedStream* stream, EnvStream* connection) {
  MutexLock lock(mutex_);
  playing_.at(stream) = connection;
}

// Plays one connection until it ends.
void ActorPool::play_connection(PlayedStream* stream) {
  stream->clock.enter(Stage::kEnvironment);
  EnvStream connection(stream->endpoint, options_.step_timeout, stream->described);
  set_connection(stream, &connection);
  const Finally forget([&] { set_connection(stream, nullptr); });
  stream->options_version = 0;
  player_.give_options(&connection, stream);
  const StreamHistory& history = stream->history;
  StreamStep first = connection.connect(seed_of(*stream, history.connection()), history.patience());
  if (!stream->described) stream->described = connection.description();
  play_first_to_last(&connection, stream, std::move(first));
}

void ActorPool::play_first_to_last(EnvStream* connection, PlayedStream* stream, StreamStep first) {
  stream->history.came_up();
  const auto caller = inference_batcher_->caller();
  roster_.came_up(stream->number);
  const Finally down([&] { roster_.went_down(); });
  player_.play(connection, stream, std::move(first));
}

std::string ActorPool::play_joined(EnvStream* connection) {
  if (stopped()) return "";
  const Endpoint& endpoint = connection->endpoint();
  const std::int64_t number = roster_.add(endpoint.address);
  std::string why;
  try {
    PlayedStream stream = new_stream(number, endpoint);
    run_stream(&stream, [&] { why = play_once(connection, &stream); });
  } catch (const std::bad_alloc& error) {  // before run_stream(), which does not throw
    return roster_.remove(number, StreamRoster::End::kLost, error);
  }
  return why;
}

// Plays the stream of a host that has joined; returns why it ended. If the host comes back, it is
// by another stream.
std::string ActorPool::play_once(EnvStream* connection, PlayedStream* stream) {
  using End = StreamRoster::End;
  stream->clock.enter(Stage::kEnvironment);
  set_connection(stream, connection);
  const Finally forget([&] { set_connection(stream, nullptr); });
  try {
    player_.give_options(connection, stream);
    StreamStep first = connection->begin(seed_of(*stream, 0));
    play_first_to_last(connection, stream, std::move(first));
  } catch (const LostStream& error) {
    if (closed()) throw ClosedBatchingQueue("the pool stopped");
    return roster_.remove(stream->number, End::kLost, error);
  } catch (const UnfitStream& error) {
    return roster_.remove(stream->number, End::kLost, error);
  } catch (const OutOfMemory& error) {  // for its rollouts, which end with the stream
    return roster_.remove(stream->number, End::kLost, error);
  } catch (const EnvironmentFailure& error) {
    return roster_.remove(stream->number, End::kFailed, error);
  } catch (const Unresponsive& error) {
    return roster_.remove(stream->number, End::kFailed, error);
  }
  return "";
}

PlayedStream ActorPool::new_stream(std::int64_t number, Endpoint endpoint) const {
  const auto part = static_cast<std::uint64_t>(number);
  return {.number = number,
          .endpoint = std::move(endpoint),
          .history = StreamHistory(options_.retries, derived_seed(options_.seed, part, kPauses))};
}

std::uint64_t ActorPool::seed_of(const PlayedStream& stream, std::uint64_t connection) const {
  return derived_seed(options_.seed, static_cast<std::uint64_t>(stream.number), connection);
}

// ---- What is reported -----------------------------------------------------------------------

std::optional<TooFewStreams> ActorPool::shortage() {
  return stopped() ? std::nullopt : roster_.shortage();
}

StageTimes ActorPool::times() const {
  MutexLock lock(mutex_);
  StageTimes total = past_times_;
  for (const auto& [stream, connection] : playing_) total += stream->clock.times();
  return total;
}

// ---- The end --------------------------------------------------------------------------------

// Records the first failure and stops the pool.
void ActorPool::fail(std::exception_ptr failure) {
  {
    MutexLock lock(mutex_);
    if (!failure_) failure_ = std::move(failure);
  }
  stop();
}

void ActorPool::stop() {
  inference_batcher_->try_close();
  learner_queue_->try_close();
  MutexLock lock(mutex_);
  stopped_ = true;
  changed_.notify_all();
}

bool ActorPool::stopped() const {
  MutexLock lock(mutex_);
  return stopped_;
}

bool ActorPool::closed() const {
  return inference_batcher_->is_closed() || learner_queue_->is_closed();
}

// ---- The thread of run() --------------------------------------------------------------------

void ActorPool::start_streams(std::vector<std::thread>* threads) {
  threads->reserve(options_.endpoints.size());
  std::int64_t number = 0;  // as the roster counts
  for (const Endpoint& endpoint : options_.endpoints) {
    std::unique_ptr<PlayedStream> stream(new PlayedStream(new_stream(number++, endpoint)));
    threads->push_back(started_thread([this, stream = std::move(stream)] {
      run_stream(stream.get(), [&] { keep_playing(stream.get()); });
    }));
  }
}

// Until the pool stops: calls poll(), passes reports on, cancels what takes too long, and notices
// closed queues and too few streams.
void ActorPool::watch(const std::function<void()>& poll, const Report& report) {
  while (!closed()) {
    poll();
    tell(report);
    cancel_late_streams();
    if (!stopped()) roster_.check_enough();
    MutexLock lock(mutex_);
    if (stopped_) break;
    changed_.wait_until(mutex_, Clock::now() + kPollInterval);
  }
  stop();
}

void ActorPool::tell(const Report& report) {
  for (const std::string& text : roster_.take_reports()) report(text);
}

void ActorPool::cancel_late_streams() {
  MutexLock lock(mutex_);
  for (const auto& [stream, connection] : playing_) {
    if (connection != nullptr) connection->cancel_if_overdue();
  }
}

// Gives streams a moment to end cleanly, then cancels those that still wait for a server or for
// inference, which may take minutes over a batch.
void ActorPool::cancel_until_ended() {
  auto cancel_at = Clock::now() + kGrace;
  MutexLock lock(mutex_);
  while (!playing_.empty()) {
    changed_.wait_until(mutex_, cancel_at);  // or a stream has ended
    if (Clock::now() < cancel_at) continue;
    inference_batcher_->cancel();
    for (const auto& [stream, connection] : playing_) {
      if (connection != nullptr) connection->cancel();
    }
    cancel_at = Clock::now() + kPollInterval;
  }
}

}  // namespace torchbeast
