// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/env_server.h"

#include <exception>
#include <future>
#include <thread>
#include <utility>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/server/activity.h"
#include "libtorchbeast/server/address_claim.h"
#include "libtorchbeast/server/call_server.h"
#include "libtorchbeast/server/original_stream.h"
#include "libtorchbeast/server/vector_stream.h"
#include "libtorchbeast/stream/wire.h"
#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/support/finally.h"
#include "libtorchbeast/support/thread.h"

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

// The learner's end of a vector stream that it has opened.
class ServedStream final : public VectorPeer {
 public:
  ServedStream(OpenStream* open, Call* call) : open_(open), call_(call) {}

  rpcenv::VectorStep* step() override { return &step_; }
  bool exchange(rpcenv::VectorAction* action) override {
    return call_->write(step_) && call_->read(action);
  }
  void count(std::int64_t steps) override { open_->count(steps); }

 private:
  OpenStream* open_;
  Call* call_;
  rpcenv::VectorStep step_;
};

}  // namespace

// Answers the calls of the protocol. Thread safety: any number of threads.
class EnvServer::Service {
 public:
  Service(EnvFactory factory, EnvServerOptions options)
      : factory_(std::move(factory)),
        options_(std::move(options)),
        description_(options_.description) {}

  // Returns the methods of a service, which they keep alive.
  static Methods methods(const std::shared_ptr<Service>& service) {
    const auto method = [&](std::string group, std::int64_t max_calls, auto answer) {
      return Method{std::move(group), max_calls, [service, answer](Call* call) {
                      return as_status(call, [&] { (service.get()->*answer)(call); });
                    }};
    };
    // More than OpenStream counts: its refusal says which limit a stream has reached.
    const std::int64_t streams = service->options_.max_streams + kOtherCalls;
    return {
        {"/rpcenv.RPCEnvServer/StreamingEnv", method("streams", streams, &Service::streaming_env)},
        {"/rpcenv.RPCEnvServer/StreamingVectorEnv",
         method("streams", streams, &Service::streaming_vector_env)},
        {"/rpcenv.RPCEnvServer/Describe", method("Describe", kOtherCalls, &Service::describe)},
        {"/rpcenv.RPCServerStatus/GetStatus",
         method("GetStatus", kOtherCalls, &Service::get_status)}};
  }

 private:
  void streaming_env(Call* call) {
    OpenStream open(&activity_, options_.max_streams);
    with_environment(factory_, options_.close_grace,
                     [&](Env& env) { stream_original(env, &open, call); });
  }

  void streaming_vector_env(Call* call) {
    OpenStream open(&activity_, options_.max_streams);
    rpcenv::VectorAction first;
    if (!call->read(&first)) return;
    ServedStream stream(&open, call);
    VectorPeer* const peer = &stream;
    with_environment(factory_, options_.close_grace,
                     [&](Env& env) { stream_vector(env, first, peer); });
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
    message.set_uptime_s(in_seconds(Clock::now() - activity_.since));
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
    with_environment(factory_, options_.close_grace, [&](Env& env) {
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
  Activity activity_;
  Mutex mutex_;
  std::optional<EnvDescription> description_ GUARDED_BY(mutex_);
};

EnvServer::EnvServer(EnvFactory factory, Endpoint endpoint, EnvServerOptions options)
    : endpoint_(std::move(endpoint)), options_(std::move(options)), factory_(std::move(factory)) {}

EnvServer::~EnvServer() = default;

void EnvServer::run(const std::function<void()>& poll) {
  begin();
  const Finally idle([this] { set_state(State::kIdle); });  // whatever ends it
  serve(poll);
}

void EnvServer::begin() {
  MutexLock lock(mutex_);
  if (state_ != State::kIdle) throw std::runtime_error("Server already running");
  state_ = State::kStarting;
  runner_ = std::this_thread::get_id();
  ++run_number_;
}

void EnvServer::serve(const std::function<void()>& poll) {
  const AddressClaim claim(endpoint_);
  auto calls = std::make_unique<CallServer>(
      endpoint_, Service::methods(std::make_shared<Service>(factory_, options_)));
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
  std::thread thread = started_thread(
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
  while (state_ != State::kServing && state_changed_.wait_until(mutex_, deadline)) continue;
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
