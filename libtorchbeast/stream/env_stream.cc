// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/env_stream.h"

#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>

#include "libtorchbeast/batching/input_check.h"
#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/stream/frame_stack.h"
#include "rpcenv.grpc.pb.h"

namespace torchbeast {
namespace {

constexpr int kMaxHeaderBytes = 64 << 10;  // a traceback travels as a header
constexpr auto kCancelInterval = std::chrono::milliseconds(50);
// A call that has ended says at once why. Where that does not come the call has not ended: what was
// read was no message.
constexpr std::chrono::milliseconds kReasonTimeout(5000);
constexpr char kNoMessage[] = "instead of a step it sent bytes that are no message of the protocol";

// Has gRPC wait for sockets by poll(), unless it has started already or the user chose.
//
// By default, epoll, whichever thread waits takes what comes for any stream and wakes the thread
// that it is for. A stream has a connection and a thread of its own: with poll() each thread waits
// for its own socket, which doubles the messages a second. gRPC learns of the choice once, when it
// starts, and from the environment only. It is not left there: what this process starts may be a
// server, which is slower with poll().
void wait_for_own_sockets() {
  constexpr auto kVariable = "GRPC_POLL_STRATEGY";
  static const bool chosen_by_user = [] {
    if (std::getenv(kVariable) != nullptr) return true;
    ::setenv(kVariable, "poll", 1);
    grpc_init();  // never shut down: it would learn of another choice when it starts again
    ::unsetenv(kVariable);
    return false;
  }();
  static_cast<void>(chosen_by_user);
}

std::shared_ptr<grpc::Channel> make_channel(const std::string& address) {
  wait_for_own_sockets();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(codec::kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(codec::kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, kMaxHeaderBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // A connection of its own for every stream: they do not share one transport's lock.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // A server that starts a moment later is found soon, not after gRPC's default of a second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

std::chrono::system_clock::time_point from_now(std::chrono::milliseconds duration) {
  return std::chrono::system_clock::now() + duration;
}

std::string seconds(std::chrono::milliseconds duration) {
  const auto count = duration.count();
  return count % 1000 == 0 ? std::to_string(count / 1000) + " s" : std::to_string(count) + " ms";
}

// The message, naming the address once.
std::string with_origin(const std::string& address, const std::string& message) {
  const std::string origin = "environment server at " + address + ": ";
  return message.starts_with(origin) ? message : origin + message;
}

std::string nobody_answers(const std::string& address, std::chrono::milliseconds timeout) {
  return "no environment server answers at " + address + " within " + seconds(timeout) +
         "; start one there, or name the address of one that runs";
}

// The exception for a call that did not end with OK.
std::exception_ptr as_exception(const grpc::Status& status, const std::string& address) {
  const std::string message = with_origin(address, status.error_message());
  switch (status.error_code()) {
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:  // what grpcio answers when a Python server raises
      return std::make_exception_ptr(EnvironmentFailure(message));
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::UNIMPLEMENTED:
      return std::make_exception_ptr(std::invalid_argument(message));
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return std::make_exception_ptr(
          TimeoutError(with_origin(address, "it accepts connections but does not answer")));
    case grpc::StatusCode::OK:
      return std::make_exception_ptr(LostStream(with_origin(address, "it ended the stream")));
    default:
      return std::make_exception_ptr(
          LostStream(with_origin(address, "connection lost (" + status.error_message() + ")")));
  }
}

Array batched(const Array& array) { return array.reshaped({1, array.size(0)}); }

// What either protocol brings in one step. Leaves and arrays are [E, ...].
struct RawStep {
  ArrayNest observation;
  Array reward, terminated, truncated, episode_end, episode_step, episode_return;
  std::optional<ArrayNest> final_observation = {};
};

// How a call ended. What the server has sent and nobody read would hold the answer back.
template <typename Stream, typename Message>
grpc::Status drained_status(Stream* stream, Message* message) {
  if (stream == nullptr) return grpc::Status::CANCELLED;
  while (stream->Read(message)) continue;
  return stream->Finish();
}

}  // namespace

// One call in one of the two protocols.
class EnvStream::Wire {
 public:
  virtual ~Wire() = default;
  // False: the call is over, finish() tells why.
  virtual bool start(std::uint64_t seed) = 0;
  virtual bool write(const ArrayNest& action) = 0;  // leaves [1, E, ...]
  virtual std::optional<RawStep> read() = 0;
  virtual void half_close() = 0;
  virtual grpc::Status finish() = 0;
  void cancel() { context_.TryCancel(); }  // before start() too

 protected:
  grpc::ClientContext context_;
};

class EnvStream::VectorWire final : public EnvStream::Wire {
 public:
  explicit VectorWire(const std::shared_ptr<grpc::Channel>& channel)
      : stub_(rpcenv::RPCEnvServer::NewStub(channel)) {}

  bool start(std::uint64_t seed) override {
    stream_ = stub_->StreamingVectorEnv(&context_);
    action_.set_seed(seed);
    return stream_->Write(action_);
  }

  bool write(const ArrayNest& action) override {
    action_.Clear();
    codec::encode(without_leading(action, 1), action_.mutable_nest_action());
    return stream_->Write(action_);
  }

  std::optional<RawStep> read() override {
    if (!stream_->Read(&step_)) return std::nullopt;
    RawStep raw{.observation = codec::decode(step_.observation()),
                .reward = codec::decode(step_.reward()),
                .terminated = codec::decode(step_.terminated()),
                .truncated = codec::decode(step_.truncated()),
                .episode_end = codec::decode(step_.episode_end()),
                .episode_step = codec::decode(step_.episode_step()),
                .episode_return = codec::decode(step_.episode_return())};
    if (step_.has_final_observation()) {
      raw.final_observation = codec::decode(step_.final_observation());
    }
    return raw;
  }

  void half_close() override { stream_->WritesDone(); }
  grpc::Status finish() override { return drained_status(stream_.get(), &step_); }

 private:
  std::unique_ptr<rpcenv::RPCEnvServer::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::VectorAction, rpcenv::VectorStep>> stream_;
  rpcenv::VectorAction action_;  // reused, so that their memory is
  rpcenv::VectorStep step_;
};

class EnvStream::OriginalWire final : public EnvStream::Wire {
 public:
  explicit OriginalWire(const std::shared_ptr<grpc::Channel>& channel)
      : stub_(rpcenv::RPCEnvServer::NewStub(channel)) {}

  bool start(std::uint64_t) override {
    stream_ = stub_->StreamingEnv(&context_);
    return true;  // the server speaks first
  }

  bool write(const ArrayNest& action) override {
    action_.Clear();
    codec::encode(without_leading(action, 2), action_.mutable_nest_action());
    return stream_->Write(action_);
  }

  std::optional<RawStep> read() override {
    if (!stream_->Read(&step_)) return std::nullopt;
    // The first step says done though no episode has ended.
    const bool end = step_.done() && !std::exchange(first_, false);
    first_ = false;
    return RawStep{.observation = with_leading(codec::decode(step_.observation()), 1),
                   .reward = Array::filled<float>({1}, step_.reward()),
                   .terminated = Array::filled<bool>({1}, step_.done()),
                   .truncated = Array::filled<bool>({1}, false),
                   .episode_end = Array::filled<bool>({1}, end),
                   .episode_step = Array::filled<std::int32_t>({1}, step_.episode_step()),
                   .episode_return = Array::filled<float>({1}, step_.episode_return())};
  }

  void half_close() override { stream_->WritesDone(); }
  grpc::Status finish() override { return drained_status(stream_.get(), &step_); }

 private:
  std::unique_ptr<rpcenv::RPCEnvServer::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::Action, rpcenv::Step>> stream_;
  rpcenv::Action action_;
  rpcenv::Step step_;
  bool first_ = true;
};

// Checks a step against the description and the first step, and gives it the shape that policy
// and learner see.
class EnvStream::Translation {
 public:
  explicit Translation(const EnvDescription& description)
      : num_envs_(description.num_envs), stack_(description.frame_stack) {
    expected_ = nest::map(
        [&](const Array& leaf) {
          Shape shape{num_envs_};
          shape.insert(shape.end(), leaf.shape().begin(), leaf.shape().end());
          return Array::spec(leaf.dtype(), shape);
        },
        description.observation);
  }

  StreamStep operator()(const RawStep& raw) {
    check(raw);
    StreamStep step{.observation = {},
                    .reward = batched(raw.reward),
                    .done = either(raw.terminated, raw.truncated),
                    .episode_step = batched(raw.episode_step),
                    .episode_return = batched(raw.episode_return),
                    .terminated = batched(raw.terminated),
                    .truncated = batched(raw.truncated),
                    .episode_end = batched(raw.episode_end)};
    if (raw.final_observation) {
      step.final_observation = stack_.with_finals(*raw.final_observation, raw.truncated);
    }
    step.observation =
        with_leading(stack_.push(raw.observation, step.done.reshaped({num_envs_})), 1);
    return step;
  }

 private:
  static Array either(const Array& a, const Array& b) {
    Array result(DType::kBool, {1, a.size(0)});
    for (std::int64_t e = 0; e < a.size(0); ++e) {
      result.as<bool>()[e] = a.as<bool>()[e] || b.as<bool>()[e];
    }
    return result;
  }

  void check(const RawStep& raw) const {
    check_like(expected_, raw.observation, "observation");
    check_array(raw.reward, DType::kFloat32, "reward");
    check_array(raw.terminated, DType::kBool, "terminated");
    check_array(raw.truncated, DType::kBool, "truncated");
    check_array(raw.episode_end, DType::kBool, "episode_end");
    check_array(raw.episode_step, DType::kInt32, "episode_step");
    check_array(raw.episode_return, DType::kFloat32, "episode_return");
    check_rewards(raw.reward);
    check_ends(raw);
    check_finals(raw);
  }

  static void check_like(const ArrayNest& expected, const ArrayNest& got, const char* what) {
    try {
      nest::for_each2_with_path(
          [&](const nest::Path& path, const Array& wanted, const Array& came) {
            if (wanted.dtype() == came.dtype() && wanted.shape() == came.shape()) return;
            throw std::invalid_argument("expected " + summary(wanted) + " at " + path.str() +
                                        " as before, got " + summary(came));
          },
          expected, got);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string(what) + " of a step: " + error.what());
    }
  }

  void check_array(const Array& array, DType dtype, const char* what) const {
    if (array.dtype() == dtype && array.shape() == Shape{num_envs_}) return;
    throw std::invalid_argument(std::string(what) + " of a step: expected " +
                                summary(Array::spec(dtype, {num_envs_})) + ", got " +
                                summary(array));
  }

  void check_rewards(const Array& reward) const {
    for (std::int64_t e = 0; e < num_envs_; ++e) {
      if (std::isfinite(reward.as<float>()[e])) continue;
      throw std::invalid_argument("reward of environment " + std::to_string(e) +
                                  " must be a finite number, got " +
                                  std::to_string(reward.as<float>()[e]));
    }
  }

  void check_ends(const RawStep& raw) const {
    for (std::int64_t e = 0; e < num_envs_; ++e) {
      if (!raw.terminated.as<bool>()[e] || !raw.truncated.as<bool>()[e]) continue;
      throw std::invalid_argument("environment " + std::to_string(e) +
                                  " is both terminated and truncated; what ended is not cut off");
    }
  }

  void check_finals(const RawStep& raw) const {
    const bool* truncated = raw.truncated.as<bool>();
    const std::int64_t count = std::count(truncated, truncated + num_envs_, true);
    if (!raw.final_observation) {
      if (count == 0) return;
      throw std::invalid_argument(std::to_string(count) +
                                  " environments were truncated, but the step carries no final "
                                  "observation");
    }
    check_like(nest::map(
                   [count](const Array& leaf) {
                     Shape shape = leaf.shape();
                     shape[0] = count;
                     return Array::spec(leaf.dtype(), shape);
                   },
                   expected_),
               *raw.final_observation, "final observation");
  }

  const std::int64_t num_envs_;
  ArrayNest expected_;  // dtype and shape of an observation's leaves, [E, ...]
  FrameStack stack_;
};

namespace {

// Makes the context of a call that somebody else may cancel.
using NewContext = std::function<std::shared_ptr<grpc::ClientContext>()>;

// What a server that cannot describe itself serves: asked of the first step.
EnvDescription describe_original(rpcenv::RPCEnvServer::Stub& stub, grpc::ClientContext& context,
                                 const std::string& address) {
  const auto stream = stub.StreamingEnv(&context);
  rpcenv::Step step;
  const bool got_step = stream->Read(&step);
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  if (!got_step && status.ok()) throw std::invalid_argument(kNoMessage);
  if (!got_step) std::rethrow_exception(as_exception(status, address));
  return {.observation = codec::decode(step.observation()), .protocol_version = 0};
}

EnvDescription ask_description(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& address, const NewContext& new_context) {
  const auto stub = rpcenv::RPCEnvServer::NewStub(channel);
  rpcenv::Description message;
  const grpc::Status status = stub->Describe(new_context().get(), {}, &message);
  try {
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return describe_original(*stub, *new_context(), address);
    }
    if (!status.ok()) std::rethrow_exception(as_exception(status, address));
    return codec::decode(message);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(with_origin(address, error.what()));
  }
}

// Waits for a connection, in slices, so that `keep_waiting` can end it.
template <typename Question>
bool wait_for_connection(grpc::Channel& channel, std::chrono::milliseconds timeout,
                         const Question& keep_waiting) {
  const auto deadline = Clock::now() + timeout;
  while (keep_waiting()) {
    if (channel.WaitForConnected(from_now(kCancelInterval))) return true;
    if (Clock::now() >= deadline) return false;
  }
  return false;
}

}  // namespace

EnvDescription describe_server(const std::string& address, std::chrono::milliseconds timeout) {
  const auto channel = make_channel(address);
  if (!wait_for_connection(*channel, timeout, [] { return true; })) {
    throw TimeoutError(nobody_answers(address, timeout));
  }
  const auto deadline = from_now(timeout);
  return ask_description(channel, address, [deadline] {
    auto context = std::make_shared<grpc::ClientContext>();
    context->set_deadline(deadline);
    return context;
  });
}

EnvStream::EnvStream(std::string address, std::chrono::milliseconds step_timeout)
    : address_(std::move(address)), step_timeout_(step_timeout) {}

EnvStream::~EnvStream() {
  if (wire_ == nullptr) return;
  wire_->cancel();
  wire_->finish();
}

void EnvStream::check_cancelled() const {
  if (cancelled_) throw StreamCancelled("the stream from " + address_ + " was cancelled");
}

StreamStep EnvStream::connect(std::uint64_t seed, std::chrono::milliseconds timeout) {
  const auto channel = make_channel(address_);
  const bool connected = wait_for_connection(*channel, timeout, [&] { return !cancelled_; });
  check_cancelled();
  if (!connected) throw LostStream(nobody_answers(address_, timeout));
  description_ = describe(channel);
  translation_ = std::make_unique<Translation>(description_);
  {
    MutexLock lock(mutex_);
    check_cancelled();
    if (description_.protocol_version == 0) {
      wire_ = std::make_unique<OriginalWire>(channel);
    } else {
      wire_ = std::make_unique<VectorWire>(channel);
    }
  }
  return waiting([&] { return wire_->start(seed) ? wire_->read() : std::nullopt; });
}

EnvDescription EnvStream::describe(const std::shared_ptr<grpc::Channel>& channel) {
  try {
    return ask_description(channel, address_, [this] {
      MutexLock lock(mutex_);
      check_cancelled();
      describing_ = std::make_shared<grpc::ClientContext>();
      describing_->set_deadline(from_now(step_timeout_));
      return describing_;
    });
  } catch (const LostStream&) {
    check_cancelled();  // then this is why it was lost
    throw;
  }
}

StreamStep EnvStream::step(const ArrayNest& action) {
  return waiting([&] { return wire_->write(action) ? wire_->read() : std::nullopt; });
}

// Makes a call that waits for the server's next step, and translates the step.
template <typename Call>
StreamStep EnvStream::waiting(const Call& call) {
  check_cancelled();
  wait_at_most(step_timeout_);
  try {
    const std::optional<RawStep> raw = call();
    if (!raw) fail();
    overdue_at_ = 0;
    return (*translation_)(*raw);
  } catch (const std::invalid_argument& error) {
    overdue_at_ = 0;
    throw std::invalid_argument(with_origin(address_, error.what()));
  }
}

void EnvStream::wait_at_most(std::chrono::milliseconds limit) {
  overdue_at_ = (Clock::now() + limit).time_since_epoch().count();
}

// Throws why there is no next step.
void EnvStream::fail() {
  const bool ended = !overdue_;
  if (ended) wait_at_most(std::min(step_timeout_, kReasonTimeout));
  const grpc::Status status = wire_->finish();
  overdue_at_ = 0;
  {
    MutexLock lock(mutex_);
    wire_.reset();
  }
  check_cancelled();
  if (overdue_) throw_overdue(ended);
  std::rethrow_exception(as_exception(status, address_));
}

void EnvStream::throw_overdue(bool ended) const {
  if (ended) throw std::invalid_argument(kNoMessage);
  throw TimeoutError("environment server at " + address_ + " sent no step within " +
                     seconds(step_timeout_));
}

void EnvStream::close() {
  if (wire_ == nullptr) return;
  wire_->half_close();
  wire_->finish();
  MutexLock lock(mutex_);
  wire_.reset();
}

void EnvStream::cancel() {
  cancelled_ = true;
  MutexLock lock(mutex_);
  if (describing_ != nullptr) describing_->TryCancel();
  if (wire_ != nullptr) wire_->cancel();
}

void EnvStream::cancel_if_overdue() {
  const Clock::rep at = overdue_at_;
  if (at == 0 || Clock::now().time_since_epoch().count() < at) return;
  overdue_ = true;
  MutexLock lock(mutex_);
  if (wire_ != nullptr) wire_->cancel();
}

}  // namespace torchbeast
