// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/env_server.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cstdio>
#include <future>
#include <random>
#include <thread>
#include <vector>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/server/activity.h"
#include "libtorchbeast/server/health.h"
#include "libtorchbeast/server/unix_address.h"
#include "libtorchbeast/stream/frame_stack.h"
#include "libtorchbeast/stream/wire.h"
#include "libtorchbeast/support/errors.h"

namespace torchbeast {
namespace {

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
grpc::Status as_status(const Body& body) {
  try {
    body();
    return grpc::Status::OK;
  } catch (const std::invalid_argument& error) {
    return {grpc::StatusCode::INVALID_ARGUMENT, shortened(error.what())};
  } catch (const TooManyStreams& error) {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, error.what()};
  } catch (const std::exception& error) {
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

template <typename Stream>
void stream_original(Env& env, OpenStream* open, Stream* stream) {
  OriginalStream original(env);
  rpcenv::Step step;
  original.reset(&step);
  rpcenv::Action action;
  while (stream->Write(step) && stream->Read(&action)) {
    original.step(action, &step);
    open->count(1);
  }
}

template <typename Stream>
void stream_vector(Env& env, std::uint64_t seed, OpenStream* open, Stream* stream) {
  EpisodeCounters counters(env.num_envs());
  rpcenv::VectorStep message;
  fill(first_step(env, seed), counters, &message);
  rpcenv::VectorAction action;
  while (stream->Write(message) && stream->Read(&action)) {
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

// Returns the seed in a stream's first message; none if the client ends before it.
template <typename Stream>
std::optional<std::uint64_t> read_seed(Stream* stream) {
  rpcenv::VectorAction first;
  if (!stream->Read(&first)) return std::nullopt;
  return first.seed();
}

// Runs the body of a call, unless its client has no right to it.
template <typename Body>
grpc::Status admitted(const Credentials& credentials, grpc::ServerContext* context,
                      const Body& body) {
  const grpc::Status refusal = check_token(credentials, *context);
  if (!refusal.ok()) return refusal;
  const grpc::Status status = as_status(body);
  if (status.error_code() == grpc::StatusCode::INTERNAL) {
    context->AddTrailingMetadata(kFailureHeader, "1");
  }
  return status;
}

}  // namespace

// Calls with one request read it themselves, after the check of the token: gRPC would read up to
// 256 MiB first.
class StatusService final : public rpcenv::RPCServerStatus::StreamedUnaryService {
 public:
  StatusService(const Activity* activity, Credentials credentials)
      : activity_(activity), credentials_(std::move(credentials)) {}

 private:
  grpc::Status StreamedGetStatus(
      grpc::ServerContext* context,
      grpc::ServerUnaryStreamer<rpcenv::StatusRequest, rpcenv::ServerStatus>* stream) override {
    return admitted(credentials_, context, [&] {
      rpcenv::StatusRequest request;
      rpcenv::ServerStatus message;
      if (!stream->Read(&request)) return;
      message.set_uptime_s(std::chrono::duration<double>(Clock::now() - activity_->since).count());
      message.set_open_streams(activity_->open_streams);
      message.set_steps(activity_->steps);
      stream->Write(message);
    });
  }

  const Activity* activity_;
  const Credentials credentials_;
};

class EnvServer::Service final : public rpcenv::RPCEnvServer::StreamedUnaryService {
 public:
  Service(EnvFactory factory, EnvServerOptions options, Credentials credentials)
      : factory_(std::move(factory)),
        options_(std::move(options)),
        credentials_(std::move(credentials)),
        status_(&activity_, credentials_),
        description_(options_.description) {}

  std::vector<grpc::Service*> services() { return {this, &status_, &health_}; }

 private:
  grpc::Status StreamingEnv(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<rpcenv::Step, rpcenv::Action>* stream) override {
    return admitted(credentials_, context, [&] {
      OpenStream open(&activity_, options_.max_streams);
      with_environment(factory_, options_, [&](Env& env) { stream_original(env, &open, stream); });
    });
  }

  grpc::Status StreamingVectorEnv(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<rpcenv::VectorStep, rpcenv::VectorAction>* stream) override {
    return admitted(credentials_, context, [&] {
      OpenStream open(&activity_, options_.max_streams);
      const std::optional<std::uint64_t> seed = read_seed(stream);
      if (!seed) return;
      with_environment(factory_, options_,
                       [&](Env& env) { stream_vector(env, *seed, &open, stream); });
    });
  }

  grpc::Status StreamedDescribe(
      grpc::ServerContext* context,
      grpc::ServerUnaryStreamer<rpcenv::DescribeRequest, rpcenv::Description>* stream) override {
    return admitted(credentials_, context, [&] {
      rpcenv::DescribeRequest request;
      rpcenv::Description message;
      if (!stream->Read(&request)) return;
      codec::encode(description(), &message);
      message.set_marks_failures(true);
      stream->Write(message);
    });
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
  Activity activity_;
  StatusService status_;
  HealthService health_{
      {rpcenv::RPCEnvServer::service_full_name(), rpcenv::RPCServerStatus::service_full_name()}};
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
  std::unique_ptr<grpc::Server> server =
      start_server(endpoint_, service->services(), options_.max_streams);
  set_state(State::kServing);
  std::exception_ptr failure;
  try {
    wait_for_stop(poll);
  } catch (...) {  // the server must be shut down before it is destroyed
    failure = std::current_exception();
  }
  shut_down(std::move(server), std::move(service));
  if (failure) std::rethrow_exception(failure);
}

// gRPC's shutdown waits without limit for threads that are in an environment. It therefore runs in
// a thread of its own, which outlives this object if an environment hangs.
void EnvServer::shut_down(std::unique_ptr<grpc::Server> server, std::shared_ptr<Service> service) {
  std::promise<void> ended;
  std::future<void> end = ended.get_future();
  std::thread thread([server = std::move(server), service = std::move(service),
                      grace = options_.stop_grace, ended = std::move(ended)]() mutable {
    server->Shutdown(std::chrono::system_clock::now() + grace);
    server.reset();
    service.reset();
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
