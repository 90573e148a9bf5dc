// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/env_server.h"

#include <algorithm>
#include <cstdio>
#include <future>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "health.pb.h"
#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/server/activity.h"
#include "libtorchbeast/server/call_server.h"
#include "libtorchbeast/server/unix_address.h"
#include "libtorchbeast/stream/frame_stack.h"
#include "libtorchbeast/stream/wire.h"
#include "libtorchbeast/support/errors.h"

namespace torchbeast {
namespace {

constexpr std::int64_t kOtherCalls = 32;  // of each method except streams, at once
// How long a call without a token may keep the server waiting.
constexpr std::chrono::seconds kStrangersPatience{10};
constexpr char kHealthCheck[] = "/grpc.health.v1.Health/Check";

// The length to which status messages are shortened, in bytes of the header in which they travel.
// Peers refuse headers above 8 KiB.
constexpr std::size_t kMaxStatusMessage = 4000;

// Returns how many bytes of a header a byte takes: all but printable ASCII is escaped.
std::size_t bytes_in_header(char byte) { return byte < 0x20 || byte > 0x7E || byte == '%' ? 3 : 1; }

// Keeps the end of a long message: the end of a traceback is the most useful part.
std::string shortened(const std::string& message) {
  std::size_t start = message.size(), length = 0;
  while (start > 0 && length <= kMaxStatusMessage) length += bytes_in_header(message[--start]);
  if (length <= kMaxStatusMessage) return message;
  ++start;  // the byte that was too much
  while (start < message.size() && (message[start] & 0xC0) == 0x80)
    ++start;  // whole UTF-8 characters
  return "... " + message.substr(start);
}

// Runs the body of a call and converts exceptions to the status codes of the protocol.
template <typename Body>
grpc::Status as_status(Call* call, const Body& body) {
  try {
    body();
    return grpc::Status::OK;
  } catch (const std::invalid_argument& error) {
    return {grpc::StatusCode::INVALID_ARGUMENT, shortened(error.what())};
  } catch (const TooManyStreams& error) {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, error.what()};
  } catch (const std::exception& error) {
    call->context()->AddTrailingMetadata(kFailureHeader, "1");
    return {grpc::StatusCode::INTERNAL, shortened(error.what())};
  }
}

// Counts the steps and the return of each environment's current episode.
class EpisodeCounters {
 public:
  explicit EpisodeCounters(std::int64_t num_envs)
      : steps_(static_cast<std::size_t>(num_envs)), returns_(static_cast<std::size_t>(num_envs)) {}

  // Includes a step in the counters.
  void add(const EnvStep& step) {
    for (std::size_t e = 0; e < steps_.size(); ++e) {
      steps_[e] += 1;
      returns_[e] += step.reward.as<float>()[e];
    }
  }

  // Resets the counters of environments whose episode ended.
  void restart(const EnvStep& step) {
    for (std::size_t e = 0; e < steps_.size(); ++e) {
      if (!step.episode_end.as<bool>()[e]) continue;
      steps_[e] = 0;
      returns_[e] = 0;
    }
  }

  Array steps() const { return array_of<std::int32_t>(steps_); }
  Array returns() const { return array_of<float>(returns_); }

 private:
  template <typename To, typename From>
  static Array array_of(const std::vector<From>& values) {
    Array array(kDTypeOf<To>, {static_cast<std::int64_t>(values.size())});
    std::transform(values.begin(), values.end(), array.as<To>(),
                   [](From value) { return static_cast<To>(value); });
    return array;
  }

  std::vector<std::int32_t> steps_;
  std::vector<double> returns_;  // a long sum of floats stops growing
};

// Resets the environments and returns their first observations as a step.
EnvStep first_step(Env& env, std::uint64_t seed) {
  const Shape shape{env.num_envs()};
  return {.observation = env.reset(seed),
          .reward = Array::zeros(DType::kFloat32, shape),
          .terminated = Array::filled<bool>(shape, true),
          .truncated = Array::zeros(DType::kBool, shape),
          .episode_end = Array::zeros(DType::kBool, shape)};
}

void check_action(const ArrayNest& action, const Shape& prefix) {
  nest::for_each(
      [&](const Array& leaf) {
        const bool fits = leaf.ndim() >= prefix.size() &&
                          std::equal(prefix.begin(), prefix.end(), leaf.shape().begin());
        if (fits) return;
        throw std::invalid_argument("an action's shape must begin with " + to_string(prefix) +
                                    ", got " + to_string(leaf.shape()));
      },
      action);
}

void fill(const EnvStep& step, const EpisodeCounters& counters, rpcenv::VectorStep* message) {
  message->Clear();
  codec::encode(step.observation, message->mutable_observation());
  codec::encode(step.reward, message->mutable_reward());
  codec::encode(step.terminated, message->mutable_terminated());
  codec::encode(step.truncated, message->mutable_truncated());
  codec::encode(step.episode_end, message->mutable_episode_end());
  codec::encode(counters.steps(), message->mutable_episode_step());
  codec::encode(counters.returns(), message->mutable_episode_return());
  if (step.final_observation) {
    codec::encode(*step.final_observation, message->mutable_final_observation());
  }
  if (step.info) codec::encode(*step.info, message->mutable_info());
}

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
    message->set_episode_step(counters_.steps().as<std::int32_t>()[0]);
    message->set_episode_return(counters_.returns().as<float>()[0]);
  }

  Env& env_;
  OriginalActions actions_;
  EpisodeCounters counters_;
  FrameStack stack_;
};

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

void stream_vector(Env& env, std::uint64_t seed, OpenStream* open, Call* call) {
  EpisodeCounters counters(env.num_envs());
  rpcenv::VectorStep message;
  fill(first_step(env, seed), counters, &message);
  rpcenv::VectorAction action;
  while (call->write(message) && call->read(&action)) {
    const ArrayNest nest = codec::decode(action.nest_action());
    check_action(nest, {env.num_envs()});
    const EnvStep step = env.step(nest);
    open->count(env.num_envs());
    counters.add(step);
    fill(step, counters, &message);
    counters.restart(step);
  }
}

// Prints a failure on stderr unless the watch ends within `grace`.
//
// Closing: the destructor ends the watch. Where no thread can be started, the failure is printed at
// once.
class FailureWatch {
 public:
  FailureWatch(const std::string& failure, std::chrono::milliseconds grace) {
    try {
      thread_ = std::thread([end = ended_.get_future(), failure, grace] {
        if (end.wait_for(grace) != std::future_status::ready) print(failure);
      });
    } catch (const std::exception&) {
      print(failure);
    }
  }
  ~FailureWatch() {
    ended_.set_value();
    if (thread_.joinable()) thread_.join();
  }
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

 private:
  static void print(const std::string& failure) {
    std::fprintf(stderr, "an environment has failed, and may hang while it is closed: %s\n",
                 failure.c_str());
  }

  std::promise<void> ended_;
  std::thread thread_;
};

// Calls use(env) with an environment of its own. Watches over the end of one that has failed: the
// status that carries the failure is sent only after the environment is destroyed, which may hang
// for the same reason.
template <typename Use>
void with_environment(const EnvFactory& factory, const EnvServerOptions& options, const Use& use) {
  std::unique_ptr<Env> env = factory();
  try {
    use(*env);
  } catch (const EnvironmentFailure& failure) {
    const FailureWatch watch(failure.what(), options.close_grace);
    env.reset();
    throw;
  }
}

// Answers a health check. In place of gRPC's own service, whose calls have no limit: an open Watch
// costs the server 18 KiB, without a token.
grpc::Status check_health(Call* call) {
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  call->cancel_after(kStrangersPatience);
  if (!call->read(&request)) return grpc::Status::CANCELLED;
  if (request.service() != "" && request.service() != rpcenv::RPCEnvServer::service_full_name() &&
      request.service() != rpcenv::RPCServerStatus::service_full_name()) {
    return {grpc::StatusCode::NOT_FOUND, "no such service"};
  }
  response.set_status(grpc::health::v1::HealthCheckResponse::SERVING);
  call->write(response);
  return grpc::Status::OK;
}

}  // namespace

// Answers the calls of the protocol. Thread safety: any number of threads.
class EnvServer::Service {
 public:
  Service(EnvFactory factory, EnvServerOptions options, Credentials credentials)
      : factory_(std::move(factory)),
        options_(std::move(options)),
        credentials_(std::move(credentials)),
        description_(options_.description) {}

  // Returns how many calls of a method may be open at once, and which methods count together.
  // Strangers can only use up the calls that need no token.
  CallServer::Limit limit(const std::string& method) const {
    const auto found = methods_.find(method);
    if (found == methods_.end()) {
      return {method == kHealthCheck ? method : "unknown methods", kOtherCalls};
    }
    // More than OpenStream counts: its refusal says which limit a stream has reached.
    if (found->second == &Service::streaming_env ||
        found->second == &Service::streaming_vector_env) {
      return {"streams", options_.max_streams + kOtherCalls};
    }
    return {method, kOtherCalls};
  }

  // Returns the status that ends the call.
  grpc::Status answer(Call* call) {
    if (call->method() == kHealthCheck) return check_health(call);
    const auto method = methods_.find(call->method());
    if (method == methods_.end()) return {grpc::StatusCode::UNIMPLEMENTED, "no such method"};
    // Before a message is read, which may have 256 MiB.
    const grpc::Status refusal = check_token(credentials_, *call->context());
    if (!refusal.ok()) {
      call->cancel_after(kStrangersPatience);
      return refusal;
    }
    return as_status(call, [&] { (this->*method->second)(call); });
  }

 private:
  void streaming_env(Call* call) {
    OpenStream open(&activity_, options_.max_streams);
    with_environment(factory_, options_, [&](Env& env) { stream_original(env, &open, call); });
  }

  void streaming_vector_env(Call* call) {
    OpenStream open(&activity_, options_.max_streams);
    rpcenv::VectorAction first;
    if (!call->read(&first)) return;
    with_environment(factory_, options_,
                     [&](Env& env) { stream_vector(env, first.seed(), &open, call); });
  }

  void describe(Call* call) {
    rpcenv::DescribeRequest request;
    rpcenv::Description message;
    if (!call->read(&request)) return;
    codec::encode(description(), &message);
    message.set_marks_failures(true);
    call->write(message);
  }

  void get_status(Call* call) {
    rpcenv::StatusRequest request;
    rpcenv::ServerStatus message;
    if (!call->read(&request)) return;
    message.set_uptime_s(std::chrono::duration<double>(Clock::now() - activity_.since).count());
    message.set_open_streams(activity_.open_streams);
    message.set_steps(activity_.steps);
    call->write(message);
  }

  EnvDescription description() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!description_) description_ = describe_one();
    return *description_;
  }

  // Called with the lock, which only Describe uses: simultaneous requests make one environment.
  EnvDescription describe_one() const {
    EnvDescription description{.env_id = options_.env_id, .num_streams = options_.num_streams};
    with_environment(factory_, options_, [&](Env& env) {
      description.num_envs = env.num_envs();
      description.frame_stack = env.frame_stack();
      description.observation = nest::map(
          [](const Array& leaf) {
            return Array::spec(leaf.dtype(), {leaf.shape().begin() + 1, leaf.shape().end()});
          },
          narrow(env.reset(0), 0, 0, 1));
      description.action_space = env.action_space();
    });
    return description;
  }

  const EnvFactory factory_;
  const EnvServerOptions options_;
  const Credentials credentials_;
  const std::map<std::string, void (Service::*)(Call*)> methods_{
      {"/rpcenv.RPCEnvServer/StreamingEnv", &Service::streaming_env},
      {"/rpcenv.RPCEnvServer/StreamingVectorEnv", &Service::streaming_vector_env},
      {"/rpcenv.RPCEnvServer/Describe", &Service::describe},
      {"/rpcenv.RPCServerStatus/GetStatus", &Service::get_status}};
  Activity activity_;
  Mutex mutex_;
  std::optional<EnvDescription> description_ GUARDED_BY(mutex_);
};

EnvServer::EnvServer(EnvFactory factory, Endpoint endpoint, EnvServerOptions options)
    : endpoint_(std::move(endpoint)), options_(std::move(options)), factory_(std::move(factory)) {}

EnvServer::~EnvServer() = default;

void EnvServer::run(const std::function<void()>& poll) {
  begin();
  try {
    serve(poll);
  } catch (...) {  // the server is idle again, whatever ended it
    set_state(State::kIdle);
    throw;
  }
  set_state(State::kIdle);
}

void EnvServer::begin() {
  MutexLock lock(mutex_);
  if (state_ != State::kIdle) throw std::runtime_error("Server already running");
  state_ = State::kStarting;
  runner_ = std::this_thread::get_id();
  ++run_number_;
}

void EnvServer::serve(const std::function<void()>& poll) {
  const UnixAddressClaim claim(endpoint_);
  auto service = std::make_shared<Service>(factory_, options_, endpoint_.credentials);
  auto calls = std::make_unique<CallServer>(
      endpoint_, [service](const std::string& method) { return service->limit(method); },
      [service](Call* call) { return service->answer(call); });
  set_state(State::kServing);
  std::exception_ptr failure;
  try {
    wait_for_stop(poll);
  } catch (...) {  // the server must be shut down before it is destroyed
    failure = std::current_exception();
  }
  shut_down(std::move(calls));
  if (failure) std::rethrow_exception(failure);
}

// A server waits without limit for threads that are in an environment. It is therefore stopped by a
// thread of its own, which outlives this object if an environment hangs.
void EnvServer::shut_down(std::unique_ptr<CallServer> calls) {
  std::promise<void> ended;
  std::future<void> end = ended.get_future();
  std::thread thread(
      [calls = std::move(calls), grace = options_.stop_grace, ended = std::move(ended)]() mutable {
        calls->stop(grace);
        calls.reset();
        ended.set_value();
      });
  if (end.wait_for(options_.stop_grace + options_.step_grace) == std::future_status::ready) {
    thread.join();
    return;
  }
  thread.detach();
  MutexLock lock(mutex_);
  run_left_behind_ = run_number_;
}

void EnvServer::wait_for_stop(const std::function<void()>& poll) {
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (!stop_requested_) state_changed_.wait_until(mutex_, Clock::now() + kPollInterval);
      if (stop_requested_) return;
    }
    poll();
  }
}

void EnvServer::stop() {
  MutexLock lock(mutex_);
  if (state_ == State::kIdle) throw std::runtime_error("Server not running");
  stop_requested_ = true;
  state_changed_.notify_all();
  if (runner_ == std::this_thread::get_id()) return;
  // The thread in run() may have begun another run before this one wakes.
  const std::int64_t run = run_number_;
  while (state_ != State::kIdle && run_number_ == run) state_changed_.wait(mutex_);
  if (run_left_behind_ == run) {
    throw TimeoutError("environment server at " + endpoint_.address +
                       ": an environment was still in a step " +
                       std::to_string(options_.step_grace.count()) +
                       " ms after stop(); its thread is left behind until the step returns");
  }
}

void EnvServer::request_stop() {
  MutexLock lock(mutex_);
  stop_requested_ = true;
  state_changed_.notify_all();
}

bool EnvServer::wait_until_serving(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  MutexLock lock(mutex_);
  while (state_ != State::kServing) {
    if (!state_changed_.wait_until(mutex_, deadline) && Clock::now() >= deadline) break;
  }
  return state_ == State::kServing;
}

void EnvServer::set_state(State state) {
  MutexLock lock(mutex_);
  state_ = state;
  if (state == State::kIdle) {
    stop_requested_ = false;
    runner_ = {};
  }
  state_changed_.notify_all();
}

}  // namespace torchbeast
