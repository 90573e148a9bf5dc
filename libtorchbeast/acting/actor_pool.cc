// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/actor_pool.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <thread>
#include <utility>

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

// Makes the inputs of inference: ((observation, reward, done, ...), agent_state).
ArrayNest inference_inputs(const StreamStep& step, const ArrayNest& agent_state) {
  std::vector<ArrayNest> env{step.observation, ArrayNest(step.reward), ArrayNest(step.done),
                             ArrayNest(step.episode_step), ArrayNest(step.episode_return)};
  std::vector<ArrayNest> inputs;
  inputs.emplace_back(std::move(env));
  inputs.push_back(agent_state);
  return ArrayNest(std::move(inputs));
}

// Throws std::invalid_argument unless the outputs are ((action, ...), new_agent_state).
void check_agent_answer(const ArrayNest& outputs) {
  if (!outputs.is_vector()) throw std::invalid_argument("Expected agent output to be tuple");
  if (outputs.as_vector().size() != 2) {
    throw std::invalid_argument(
        "Expected agent output to be ((action, ...), new_state) but got sequence of length " +
        std::to_string(outputs.as_vector().size()));
  }
  if (!outputs.as_vector()[0].is_vector() || outputs.as_vector()[0].as_vector().empty()) {
    throw std::invalid_argument("Expected first entry of agent output to be a (action, ...) tuple");
  }
}

std::string within(std::chrono::milliseconds window, int failures) {
  return "failure " + std::to_string(failures) + " within " + to_string(window);
}

// Adds the stream and its server's address to the message of an error in inference or in its
// outputs. Errors from the server name the address already.
template <typename Error>
Error with_stream(const Error& error, std::int64_t number, const std::string& address) {
  const std::string message = error.what();
  if (message.find(address) != std::string::npos) return error;
  return Error(message + " (stream " + std::to_string(number) + ", of the environment server at " +
               address + ")");
}

// A std::bad_alloc that says where.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(const std::string& message) : message_(message) {}
  const char* what() const noexcept override { return message_.what(); }

 private:
  std::runtime_error message_;  // unlike std::string it is copied without an allocation
};

// Counts a stream as live for a scope.
class Alive {
 public:
  explicit Alive(std::atomic<std::int64_t>* count) : count_(count) { ++*count_; }
  ~Alive() { --*count_; }
  Alive(const Alive&) = delete;
  Alive& operator=(const Alive&) = delete;

 private:
  std::atomic<std::int64_t>* count_;
};

}  // namespace

ActorPool::Registration::Registration(ActorPool* pool, const Stream& stream, EnvStream* connection)
    : pool_(pool), number_(stream.number) {
  MutexLock lock(pool_->mutex_);
  pool_->members_.at(number_).connection = connection;
}

ActorPool::Registration::~Registration() {
  MutexLock lock(pool_->mutex_);
  pool_->members_.at(number_).connection = nullptr;
}

ActorPool::ActorPool(ActorPoolOptions options, std::shared_ptr<RolloutQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     ArrayNest initial_agent_state)
    : options_(std::move(options)),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      initial_agent_state_(std::move(initial_agent_state)),
      shortage_watch_(options_.retries.reconnect_timeout) {
  if (learner_queue_ == nullptr) throw std::invalid_argument("learner_queue must not be None");
  if (inference_batcher_ == nullptr) {
    throw std::invalid_argument("inference_batcher must not be None");
  }
  if (options_.unroll_length < 1) {
    throw std::invalid_argument("unroll_length must be >= 1, got " +
                                std::to_string(options_.unroll_length));
  }
  const auto count = static_cast<std::int64_t>(options_.endpoints.size());
  if (options_.min_streams < 0 || (count > 0 && options_.min_streams > count)) {
    throw std::invalid_argument("min_streams must be at most the number of streams, " +
                                std::to_string(count) + ", got " +
                                std::to_string(options_.min_streams));
  }
  nest::for_each(
      [](const Array& leaf) {
        if (leaf.ndim() >= 2 && leaf.size(1) == 1) return;
        throw std::invalid_argument(
            "initial_agent_state needs leaves [layers, 1, ...], one environment's, got " +
            to_string(leaf.shape()));
      },
      initial_agent_state_);
  for (const Endpoint& endpoint : options_.endpoints) enrol(endpoint);
}

void ActorPool::run(const std::function<void()>& poll, const Report& report) {
  if (ran_.exchange(true)) throw std::runtime_error("ActorPool.run() may be called once only");
  try {
    watch(poll, report);
  } catch (...) {  // threads must be joined even if poll(), or starting one of them, throws
    fail(std::current_exception());
  }
  cancel_until_ended();
  join_ended_streams();
  tell(report);
  MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

// ---- Streams that come and go
// --------------------------------------------------------------------

ActorPool::Stream* ActorPool::enrol(Endpoint endpoint) {
  const std::int64_t number = next_number_++;
  auto stream =
      std::unique_ptr<Stream>(new Stream{.number = number, .endpoint = std::move(endpoint)});
  Stream* const enrolled = stream.get();
  members_.emplace(number, Member{.stream = std::move(stream)});
  return enrolled;
}

void ActorPool::start_new_streams() {
  MutexLock lock(mutex_);
  if (stopped_) return;
  for (auto& [number, member] : members_) {
    if (member.has_started) continue;
    member.thread = started_thread([this, stream = member.stream.get()] {
      run_stream(stream, [this, stream] { keep_playing(stream); });
    });
    member.has_started = true;
    ++running_;
  }
}

// Joins the threads that have ended, and forgets the streams that have left.
void ActorPool::join_ended_streams() {
  MutexLock lock(mutex_);
  for (auto next = members_.begin(); next != members_.end();) {
    const auto current = next++;
    Member& member = current->second;
    if (member.has_started && !member.has_ended) continue;
    if (member.thread.joinable()) member.thread.join();  // at once: it needs no lock any more
    if (!member.has_left) continue;
    past_times_ += member.stream->clock.times();
    members_.erase(current);
  }
}

void ActorPool::cancel_late_streams() {
  MutexLock lock(mutex_);
  for (auto& [number, member] : members_) {
    if (member.connection != nullptr) member.connection->cancel_if_overdue();
  }
}

// ---- The thread of a stream
// ----------------------------------------------------------------------

void ActorPool::run_stream(Stream* stream, const std::function<void()>& body) noexcept {
  try {
    body();
  } catch (const ClosedBatchingQueue&) {  // the normal end
    stop();
  } catch (const StreamCancelled&) {  // the pool is stopping already
    stop();
  } catch (...) {
    fail(std::current_exception());
  }
  stream->clock.enter(Stage::kNone);
  MutexLock lock(mutex_);
  members_.at(stream->number).has_ended = true;
  --running_;
  changed_.notify_all();
}

// Plays one stream until the pool stops, and connects again if the stream is lost or its
// environments fail. Returns if the stream is retired.
void ActorPool::keep_playing(Stream* stream) {
  const auto number = static_cast<std::uint64_t>(stream->number);
  StreamHistory history(options_.retries, derived_seed(options_.seed, number, kPauses));
  std::optional<EnvDescription> described;  // by the first connection that came up
  for (bool goes_on = true; goes_on;) {
    try {
      play(stream, &history, &described);
    } catch (const LostStream& lost) {
      if (closed()) throw ClosedBatchingQueue("the pool stopped");  // the loss no longer matters
      if (history.is_up()) ++lost_;
      goes_on = obey(history.lost(), lost, stream, history);
    } catch (const EnvironmentFailure& failure) {
      goes_on = obey(history.failed(), failure, stream, history);
    } catch (const Unresponsive& hanging) {
      goes_on = obey(history.failed(), hanging, stream, history);
    }
  }
}

// Does what follows a connection that ended with this error: waits for the next one, retires the
// stream and returns false, or throws the error, which ends the run.
template <typename Error>
bool ActorPool::obey(const Verdict& verdict, const Error& error, Stream* stream,
                     const StreamHistory& history) {
  const Error whole(error.what() + verdict.why);
  if (verdict.next == Verdict::Next::kEndRun) throw whole;
  if (verdict.next == Verdict::Next::kRetire) {
    retire(stream, verdict, whole);
    return false;
  }
  note_end(stream, verdict, error, history.may_be_away());
  stream->clock.enter(Stage::kEnvironment);
  pause(history.pause());
  return true;
}

// Records the end of a connection that another one follows.
void ActorPool::note_end(Stream* stream, const Verdict& verdict, const std::exception& error,
                         bool is_away) {
  if (verdict.failures > 0) ++restarted_;
  const std::string said = said_by_server(error, stream->endpoint.address);
  MutexLock lock(mutex_);
  const bool was_away = stream->away_since != 0;
  if (is_away && !was_away) stream->away_since = Clock::now().time_since_epoch().count();
  if (!said.empty() || !was_away) last_end_ = error.what();  // else its loss says more
  members_.at(stream->number).why_away = said;
  if (verdict.failures == 0) return;
  reports_.push_back("stream " + std::to_string(stream->number) + " gets new environments after " +
                     within(options_.retries.failure_window, verdict.failures) +
                     ", and is retired after " + std::to_string(options_.retries.failures) + ": " +
                     error.what());
}

// Throws the error, which ends the run, if too few streams are left.
template <typename Error>
void ActorPool::retire(Stream* stream, const Verdict& verdict, const Error& error) {
  MutexLock lock(mutex_);
  members_.at(stream->number).is_retired = true;
  const Strength left = strength();
  std::string report = "stream " + std::to_string(stream->number) + " is retired";
  if (verdict.failures > 0) {
    report += " after " + within(options_.retries.failure_window, verdict.failures);
  }
  report += ", " + std::to_string(left.unretired) + " of " + std::to_string(left.all) +
            " streams are left";
  if (left.unretired < needed(left)) {
    throw Error(report + ", and the run needs " + std::to_string(needed(left)) +
                " (min_streams): " + error.what());
  }
  reports_.push_back(report + ": " + error.what());
}

// Waits before the next connection. Throws ClosedBatchingQueue if the pool stops meanwhile.
void ActorPool::pause(std::chrono::milliseconds pause) {
  const auto until = Clock::now() + pause;
  MutexLock lock(mutex_);
  while (!stopped_ && Clock::now() < until) changed_.wait_until(mutex_, until);
  if (stopped_) throw ClosedBatchingQueue("the pool stopped");
}

// Plays one connection until it ends.
void ActorPool::play(Stream* stream, StreamHistory* history,
                     std::optional<EnvDescription>* described) {
  stream->clock.enter(Stage::kEnvironment);
  EnvStream connection(stream->endpoint, options_.step_timeout, *described);
  const Registration registration(this, *stream, &connection);
  const auto number = static_cast<std::uint64_t>(stream->number);
  stream->options_version = 0;
  give_options(&connection, stream);
  StreamStep first = connection.connect(derived_seed(options_.seed, number, history->connection()),
                                        history->patience());
  if (!*described) *described = connection.description();
  play_first_to_last(&connection, stream, std::move(first), history);
}

// Plays a connection from its first step on.
void ActorPool::play_first_to_last(EnvStream* connection, Stream* stream, StreamStep first,
                                   StreamHistory* history) {
  const std::string& address = stream->endpoint.address;
  history->came_up();
  stream->away_since = 0;
  const DynamicBatcher::Caller caller(inference_batcher_.get());
  const Alive alive(&live_);
  try {
    step_until_stopped(connection, stream, std::move(first), history);
  } catch (const ClosedBatchingQueue&) {
    connection->close();
    throw;
  } catch (const Unresponsive&) {
    throw;
  } catch (const AsyncError& error) {
    throw with_stream(error, stream->number, address);
  } catch (const TimeoutError& error) {
    throw with_stream(error, stream->number, address);
  } catch (const UnfitStream& error) {
    throw with_stream(error, stream->number, address);
  } catch (const std::invalid_argument& error) {
    throw with_stream(error, stream->number, address);
  } catch (const std::bad_alloc&) {
    throw with_stream(OutOfMemory("out of memory"), stream->number, address);
  }
}

void ActorPool::set_env_options(std::string json) {
  MutexLock lock(mutex_);
  env_options_ = std::move(json);
  ++options_version_;
}

// Gives a connection the options, unless it has them.
void ActorPool::give_options(EnvStream* connection, Stream* stream) {
  if (stream->options_version == options_version_) return;
  MutexLock lock(mutex_);
  connection->give_options(env_options_);
  stream->options_version = options_version_;
}

std::string ActorPool::play_joined(EnvStream* connection) {
  Stream* stream = nullptr;
  {
    MutexLock lock(mutex_);
    if (stopped_) return "";
    stream = enrol(connection->endpoint());
    members_.at(stream->number).has_started = true;
    ++running_;
  }
  std::string why;
  run_stream(stream, [&] { why = play_once(connection, stream); });
  return why;
}

// Plays the stream of a host that has joined; returns why it ended. If the host comes back, it is
// by another stream.
std::string ActorPool::play_once(EnvStream* connection, Stream* stream) {
  const auto number = static_cast<std::uint64_t>(stream->number);
  StreamHistory history(options_.retries, number);
  stream->clock.enter(Stage::kEnvironment);
  const Registration registration(this, *stream, connection);
  try {
    give_options(connection, stream);
    StreamStep first = connection->begin(derived_seed(options_.seed, number, 0));
    play_first_to_last(connection, stream, std::move(first), &history);
  } catch (const LostStream& lost) {
    if (closed()) throw ClosedBatchingQueue("the pool stopped");
    ++lost_;
    return let_go(stream, lost);
  } catch (const UnfitStream& unfit) {
    ++lost_;
    return let_go(stream, unfit);
  } catch (const OutOfMemory& missing) {  // for its rollouts, which end with the stream
    ++lost_;
    return let_go(stream, missing);
  } catch (const EnvironmentFailure& failure) {
    ++restarted_;
    return let_go(stream, failure);
  } catch (const Unresponsive& hanging) {
    ++restarted_;
    return let_go(stream, hanging);
  }
  return "";
}

// Lets `watch` forget a stream; returns why it has ended.
std::string ActorPool::let_go(Stream* stream, const std::exception& error) {
  MutexLock lock(mutex_);
  members_.at(stream->number).has_left = true;
  return last_end_ = error.what();
}

Answer ActorPool::ask(const StreamStep& step, const ArrayNest& agent_state) {
  Answer answer = inference_batcher_->compute(inference_inputs(step, agent_state));
  check_agent_answer(answer.outputs);
  return answer;
}

// Ends with an exception: ClosedBatchingQueue at a normal end, another for a
// failure. Counts the rollouts that have been enqueued.
void ActorPool::step_until_stopped(EnvStream* connection, Stream* stream, StreamStep step,
                                   StreamHistory* history) {
  const std::int64_t num_envs = connection->num_envs();
  const std::int64_t columns = options_.rollout_columns > 0 ? options_.rollout_columns : num_envs;
  RolloutWriter writer({.unroll_length = options_.unroll_length,
                        .num_envs = num_envs,
                        .columns = columns,
                        .first_env = stream->number * kMaxEnvsPerStream,
                        .first_rollout = history->first_rollout(),
                        .max_bytes = options_.max_rollout_bytes});
  ArrayNest agent_state = nest::map(
      [num_envs](const Array& leaf) { return repeat(leaf, 1, num_envs); }, initial_agent_state_);
  StageClock& clock = stream->clock;
  clock.enter(Stage::kInference);
  Answer answer = ask(step, agent_state);
  writer.start(step, {answer.outputs.as_vector()[0], answer.version}, agent_state);
  for (;;) {
    clock.enter(Stage::kEnvironment);
    const ArrayNest& outputs = answer.outputs.as_vector()[0];
    give_options(connection, stream);
    step = connection->step(outputs.as_vector()[0]);
    steps_ += num_envs;
    agent_state = answer.outputs.as_vector()[1];
    if (writer.append(step, {outputs, answer.version})) {
      clock.enter(Stage::kQueueing);
      hand_over(writer.complete(agent_state), columns);
      history->completed_rollout();
    }
    clock.enter(Stage::kInference);
    answer = ask(step, agent_state);
  }
}

void ActorPool::hand_over(std::vector<QueueItem> items, std::int64_t columns) {
  for (QueueItem& item : items) {
    learner_queue_->enqueue(std::move(item));
    count_ += options_.unroll_length * columns;
  }
}

// ---- Figures
// -------------------------------------------------------------------------------------

std::vector<AwayStream> ActorPool::away_streams() const {
  const auto now = Clock::now().time_since_epoch();
  std::vector<AwayStream> away;
  MutexLock lock(mutex_);
  for (const auto& [number, member] : members_) {
    const Clock::duration since(member.stream->away_since);
    if (since.count() == 0 || member.is_retired) continue;
    away.push_back({member.stream->endpoint.address, now - since, member.why_away});
  }
  return away;
}

std::int64_t ActorPool::retired_streams() const {
  MutexLock lock(mutex_);
  const Strength now = strength();
  return now.all - now.unretired;
}

std::int64_t ActorPool::num_streams() const {
  MutexLock lock(mutex_);
  return static_cast<std::int64_t>(members_.size());
}

std::optional<TooFewStreams> ActorPool::shortage() {
  MutexLock lock(mutex_);
  return note_shortage();
}

StageTimes ActorPool::times() const {
  MutexLock lock(mutex_);
  StageTimes total = past_times_;
  for (const auto& [number, member] : members_) total += member.stream->clock.times();
  return total;
}

ActorPool::Strength ActorPool::strength() const {
  Strength strength;
  for (const auto& [number, member] : members_) {
    if (member.has_left) continue;
    ++strength.all;
    if (member.is_retired) continue;
    ++strength.unretired;
    if (member.stream->away_since == 0) ++strength.present;
  }
  return strength;
}

std::int64_t ActorPool::needed(const Strength& strength) const {
  if (options_.min_streams > 0) return options_.min_streams;
  return std::max<std::int64_t>(1, (strength.all + 1) / 2);
}

std::optional<TooFewStreams> ActorPool::note_shortage() {
  if (stopped_) return std::nullopt;
  const Strength now = strength();
  return shortage_watch_.note(now.present, needed(now), Clock::now());
}

// ---- The end
// -------------------------------------------------------------------------------------

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

bool ActorPool::closed() const {
  return inference_batcher_->is_closed() || learner_queue_->is_closed();
}

// Until the pool stops: calls poll(), starts and joins threads, cancels what takes too long, and
// notices closed queues.
void ActorPool::watch(const std::function<void()>& poll, const Report& report) {
  while (!closed()) {
    poll();
    tell(report);
    start_new_streams();
    join_ended_streams();
    cancel_late_streams();
    check_enough_streams();
    MutexLock lock(mutex_);
    if (stopped_) break;
    changed_.wait_until(mutex_, Clock::now() + kPollInterval);
  }
  stop();
}

void ActorPool::tell(const Report& report) {
  std::vector<std::string> reports;
  {
    MutexLock lock(mutex_);
    reports.swap(reports_);
  }
  for (const std::string& text : reports) report(text);
}

// Throws once a shortage has lasted for reconnect_timeout.
void ActorPool::check_enough_streams() {
  MutexLock lock(mutex_);
  const std::optional<TooFewStreams> found = note_shortage();
  if (!found || found->left > Clock::duration(0)) return;
  throw ConnectionError(std::to_string(found->connected) + " of " + std::to_string(strength().all) +
                        " streams are connected, and the run needs " +
                        std::to_string(found->needed) + " (min_streams)" +
                        (last_end_.empty() ? "" : "; the last loss: ") + last_end_);
}

// Gives streams a moment to end cleanly, then cancels those that still wait for a server or for
// inference, which may take minutes over a batch.
void ActorPool::cancel_until_ended() {
  auto cancel_at = Clock::now() + kGrace;
  MutexLock lock(mutex_);
  while (running_ > 0) {
    changed_.wait_until(mutex_, cancel_at);  // or a stream has ended
    if (Clock::now() < cancel_at) continue;
    inference_batcher_->cancel();
    for (auto& [number, member] : members_) {
      if (member.connection != nullptr) member.connection->cancel();
    }
    cancel_at = Clock::now() + kPollInterval;
  }
}

}  // namespace torchbeast
