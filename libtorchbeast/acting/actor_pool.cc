// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/actor_pool.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "libtorchbeast/acting/rollout_writer.h"

namespace torchbeast {
namespace {

constexpr std::chrono::milliseconds kFirstPause(100);  // before a reconnection
constexpr std::chrono::milliseconds kLongestPause(5000);
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

// Makes the error for a server whose connections never last until a rollout is complete.
LostStream fruitless_error(const LostStream& last, int connections) {
  return LostStream(std::string(last.what()) + "; this was connection " +
                    std::to_string(connections) +
                    " in a row that ended before its first rollout: look into that server's log");
}

// Makes the error for a server whose connections never last until the first step.
LostStream never_up_error(const LostStream& last, std::uint64_t connections,
                          std::chrono::milliseconds timeout) {
  return LostStream(std::string(last.what()) + "; this was connection " +
                    std::to_string(connections) + ", and none brought a first step within " +
                    std::to_string(timeout.count()) + " ms: look into that server's log");
}

// Adds the stream and its server's address to the message of an error in inference or in its
// outputs. Errors from the server name the address already.
template <typename Error>
Error with_stream(const Error& error, std::size_t index, const std::string& address) {
  const std::string message = error.what();
  if (message.find(address) != std::string::npos) return error;
  return Error(message + " (stream " + std::to_string(index) + ", of the environment server at " +
               address + ")");
}

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

ActorPool::Registration::Registration(ActorPool* pool, EnvStream* stream)
    : pool_(pool), stream_(stream) {
  MutexLock lock(pool_->mutex_);
  pool_->streams_.insert(stream_);
}

ActorPool::Registration::~Registration() {
  MutexLock lock(pool_->mutex_);
  pool_->streams_.erase(stream_);
}

ActorPool::ActorPool(ActorPoolOptions options, std::shared_ptr<RolloutQueue> learner_queue,
                     std::shared_ptr<DynamicBatcher> inference_batcher,
                     ArrayNest initial_agent_state)
    : options_(std::move(options)),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      initial_agent_state_(std::move(initial_agent_state)),
      clocks_(options_.endpoints.size()),
      away_since_(options_.endpoints.size()) {
  if (learner_queue_ == nullptr) throw std::invalid_argument("learner_queue must not be None");
  if (inference_batcher_ == nullptr) {
    throw std::invalid_argument("inference_batcher must not be None");
  }
  if (options_.unroll_length < 1) {
    throw std::invalid_argument("unroll_length must be >= 1, got " +
                                std::to_string(options_.unroll_length));
  }
  if (options_.endpoints.empty()) {
    throw std::invalid_argument("env_server_addresses must name at least one server");
  }
  nest::for_each(
      [](const Array& leaf) {
        if (leaf.ndim() >= 2 && leaf.size(1) == 1) return;
        throw std::invalid_argument(
            "initial_agent_state needs leaves [layers, 1, ...], one environment's, got " +
            to_string(leaf.shape()));
      },
      initial_agent_state_);
}

void ActorPool::run(const std::function<void()>& poll) {
  if (ran_.exchange(true)) throw std::runtime_error("ActorPool.run() may be called once only");
  {
    MutexLock lock(mutex_);
    running_ = options_.endpoints.size();
  }
  std::vector<std::thread> threads;
  try {
    for (std::size_t i = 0; i < options_.endpoints.size(); ++i) {
      threads.emplace_back([this, i] { run_stream(i); });
    }
    watch(poll);
  } catch (...) {  // threads must be joined even if poll(), or starting one of them, throws
    fail(std::current_exception());
    MutexLock lock(mutex_);
    running_ -= options_.endpoints.size() - threads.size();
  }
  cancel_until_ended();
  for (std::thread& thread : threads) thread.join();
  MutexLock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void ActorPool::run_stream(std::size_t index) noexcept {
  try {
    keep_playing(index);
  } catch (const ClosedBatchingQueue&) {  // the normal end
    stop();
  } catch (const StreamCancelled&) {  // the pool is stopping already
    stop();
  } catch (...) {
    fail(std::current_exception());
  }
  clocks_[index].enter(Stage::kNone);
  MutexLock lock(mutex_);
  --running_;
  changed_.notify_all();
}

ActorPool::History::History(std::uint64_t seed) : backoff(kFirstPause, kLongestPause, seed) {}

// Plays one stream until the pool stops, and reconnects if the stream is lost.
void ActorPool::keep_playing(std::size_t index) {
  History history(derived_seed(options_.seed, index, kPauses));
  for (std::uint64_t attempt = 0;; ++attempt) {
    Connection connection{
        .attempt = attempt, .timeout = patience(history), .first_rollout = history.next_rollout};
    try {
      play(index, &connection, &history);
    } catch (const LostStream& lost) {
      if (closed()) throw ClosedBatchingQueue("the pool stopped");  // the loss no longer matters
      if (connection.came_up) away_since_[index] = Clock::now().time_since_epoch().count();
      judge(lost, connection, &history);
    }
    clocks_[index].enter(Stage::kEnvironment);
    pause_or_give_up(history.pause);
  }
}

// Returns how long the next connection may take.
std::chrono::milliseconds ActorPool::patience(const History& history) const {
  if (history.came_up) return std::min(kLongestPause, options_.reconnect_timeout);
  const auto waited = Clock::now() - history.away_since;
  return std::chrono::ceil<std::chrono::milliseconds>(options_.connect_timeout - waited);
}

// Records a lost connection. Throws if another attempt would be pointless.
void ActorPool::judge(const LostStream& lost, const Connection& connection, History* history) {
  const bool was_fruitful = connection.rollouts > 0;
  if (was_fruitful) history->next_rollout += connection.rollouts + 1;
  if (was_fruitful) history->backoff.restart();
  history->pause = history->backoff.next();
  if (connection.came_up) {
    ++lost_;
    history->came_up = true;
    history->away_since = Clock::now();
    history->fruitless = was_fruitful ? 0 : history->fruitless + 1;
  }
  if (history->fruitless >= options_.fruitless_connections) {
    throw fruitless_error(lost, history->fruitless);
  }
  const auto away = Clock::now() - history->away_since;
  if (history->came_up) {
    if (away >= options_.reconnect_timeout && !enough_streams_live()) throw lost;
  } else if (away + history->pause >= options_.connect_timeout) {
    if (connection.attempt == 0) throw lost;
    throw never_up_error(lost, connection.attempt + 1, options_.connect_timeout);
  }
}

bool ActorPool::enough_streams_live() const {
  return 2 * live_ >= static_cast<std::int64_t>(options_.endpoints.size());
}

// Waits before the next connection. Throws ClosedBatchingQueue if the pool stops meanwhile.
void ActorPool::pause_or_give_up(std::chrono::milliseconds pause) {
  const auto until = Clock::now() + pause;
  MutexLock lock(mutex_);
  while (!stopped_ && Clock::now() < until) changed_.wait_until(mutex_, until);
  if (stopped_) throw ClosedBatchingQueue("the pool stopped");
}

// Plays one connection until it ends.
void ActorPool::play(std::size_t index, Connection* connection, History* history) {
  const std::string& address = options_.endpoints[index].address;
  clocks_[index].enter(Stage::kEnvironment);
  EnvStream stream(options_.endpoints[index], options_.step_timeout, history->described);
  const Registration registration(this, &stream);
  StreamStep first =
      stream.connect(derived_seed(options_.seed, index, connection->attempt), connection->timeout);
  connection->came_up = true;
  if (!history->described) history->described = stream.description();
  away_since_[index] = 0;
  const DynamicBatcher::Caller caller(inference_batcher_.get());
  const Alive alive(&live_);
  try {
    step_until_stopped(&stream, index, std::move(first), connection);
  } catch (const ClosedBatchingQueue&) {
    stream.close();
    throw;
  } catch (const AsyncError& error) {
    throw with_stream(error, index, address);
  } catch (const TimeoutError& error) {
    throw with_stream(error, index, address);
  } catch (const std::invalid_argument& error) {
    throw with_stream(error, index, address);
  }
}

Answer ActorPool::ask(const StreamStep& step, const ArrayNest& agent_state) {
  Answer answer = inference_batcher_->compute(inference_inputs(step, agent_state));
  check_agent_answer(answer.outputs);
  return answer;
}

// Ends with an exception: ClosedBatchingQueue at the normal end, another for a failure. Counts the
// rollouts that have been enqueued.
void ActorPool::step_until_stopped(EnvStream* stream, std::size_t index, StreamStep step,
                                   Connection* connection) {
  const std::int64_t num_envs = stream->num_envs();
  const std::int64_t columns = options_.rollout_columns > 0 ? options_.rollout_columns : num_envs;
  RolloutWriter writer({.unroll_length = options_.unroll_length,
                        .num_envs = num_envs,
                        .columns = columns,
                        .first_env = static_cast<std::int64_t>(index) * kMaxEnvsPerStream,
                        .first_rollout = connection->first_rollout});
  ArrayNest agent_state = nest::map(
      [num_envs](const Array& leaf) { return repeat(leaf, 1, num_envs); }, initial_agent_state_);
  StageClock& clock = clocks_[index];
  clock.enter(Stage::kInference);
  Answer answer = ask(step, agent_state);
  writer.start(step, {answer.outputs.as_vector()[0], answer.version}, agent_state);
  for (;;) {
    clock.enter(Stage::kEnvironment);
    const ArrayNest& outputs = answer.outputs.as_vector()[0];
    step = stream->step(outputs.as_vector()[0]);
    steps_ += num_envs;
    agent_state = answer.outputs.as_vector()[1];
    if (writer.append(step, {outputs, answer.version})) {
      clock.enter(Stage::kQueueing);
      hand_over(writer.complete(agent_state), columns);
      ++connection->rollouts;
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

std::vector<AwayStream> ActorPool::away_streams() const {
  const auto now = Clock::now().time_since_epoch();
  std::vector<AwayStream> away;
  for (std::size_t i = 0; i < away_since_.size(); ++i) {
    const Clock::duration since(away_since_[i]);
    if (since.count() != 0) away.push_back({options_.endpoints[i].address, now - since});
  }
  return away;
}

StageTimes ActorPool::times() const {
  StageTimes total;
  for (const StageClock& clock : clocks_) total += clock.times();
  return total;
}

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

// Until the pool stops: calls poll(), cancels overdue streams, and notices closed queues.
void ActorPool::watch(const std::function<void()>& poll) {
  while (!closed()) {
    poll();
    cancel_overdue_streams();
    MutexLock lock(mutex_);
    if (stopped_) break;
    changed_.wait_until(mutex_, Clock::now() + kPollInterval);
  }
  stop();
}

void ActorPool::cancel_overdue_streams() {
  MutexLock lock(mutex_);
  for (EnvStream* stream : streams_) stream->cancel_if_overdue();
}

// Gives streams a moment to end cleanly, then cancels those that still wait for a server or for
// inference, which may take minutes over a batch.
void ActorPool::cancel_until_ended() {
  const auto deadline = Clock::now() + kGrace;
  MutexLock lock(mutex_);
  while (running_ > 0) {
    if (changed_.wait_until(mutex_, std::max(deadline, Clock::now() + kPollInterval))) continue;
    inference_batcher_->cancel();
    for (EnvStream* stream : streams_) stream->cancel();
  }
}

}  // namespace torchbeast
