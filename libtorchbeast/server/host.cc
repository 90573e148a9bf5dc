// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/host.h"

#include <grpcpp/grpcpp.h>

#include <stdexcept>
#include <utility>

#include "libtorchbeast/proto/readable.h"
#include "libtorchbeast/server/vector_stream.h"
#include "libtorchbeast/stream/stream_errors.h"
#include "libtorchbeast/stream/time_limit.h"
#include "libtorchbeast/stream/wire.h"
#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/support/finally.h"

namespace torchbeast {
namespace {

// How long a failed environment may take to close before its failure is printed on stderr.
constexpr std::chrono::seconds kCloseGrace{5};
// How long a learner may take to end a call in which the host has nothing more to say.
constexpr std::chrono::seconds kLastWords{5};

// Throws the exception for a status with which the learner ended a stream; returns for OK.
void check(const grpc::Status& status, const std::string& address) {
  const std::string origin = "learner at " + address + ": ";
  switch (status.error_code()) {
    case grpc::StatusCode::OK:
      return;
    case grpc::StatusCode::UNAUTHENTICATED:
      throw Unauthenticated(origin + readable(status.error_message()));
    case grpc::StatusCode::FAILED_PRECONDITION:  // another learner may use them
    case grpc::StatusCode::ABORTED:
      throw LostStream(
          origin + "it does not use this host's environments: " + readable(status.error_message()));
    case grpc::StatusCode::INVALID_ARGUMENT:
      throw std::invalid_argument(origin + readable(status.error_message()));
    case grpc::StatusCode::UNIMPLEMENTED:
      throw std::invalid_argument(origin +
                                  "no learner that hosts can dial in to listens there: give the "
                                  "--listen address of a polybeast_learner of this version");
    default:
      throw LostStream(origin + "connection lost (" + readable(status.error_message()) + ")");
  }
}

}  // namespace

// One call, at the host's end.
class Host::Stream final : public VectorPeer {
 public:
  Stream(const std::shared_ptr<grpc::Channel>& channel, const Credentials& credentials)
      : stub_(rpcenv::RPCLearner::NewStub(channel)) {
    add_token(credentials, &context_);
  }

  // Describes the environments. Returns false once the call is over.
  bool join(const EnvDescription& description, const std::string& name) {
    call_ = stub_->Join(&context_);
    codec::encode(description, message_.mutable_joining()->mutable_description());
    message_.mutable_joining()->set_host(name);
    const bool is_sent = call_->Write(message_);
    message_.Clear();
    return is_sent;
  }

  // Waits until the learner takes the stream.
  bool is_taken(rpcenv::VectorAction* first) { return call_->Read(first); }

  rpcenv::VectorStep* step() override { return message_.mutable_step(); }
  bool exchange(rpcenv::VectorAction* action) override {
    return call_->Write(message_) && call_->Read(action);
  }
  void count(std::int64_t) override {}

  void tell(const std::string& failure) {
    message_.Clear();
    message_.set_failure(failure);
    call_->Write(message_);
  }

  // The half-close lets a learner end a call whose bytes were no message, which gRPC reports like
  // the end of the call. One that does not end it is left.
  grpc::Status finish() {
    TimeLimit limit(&context_, kLastWords);
    call_->WritesDone();
    return limit.status(drained_status(call_.get(), &left_));
  }

  void cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<rpcenv::RPCLearner::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::HostMessage, rpcenv::VectorAction>> call_;
  rpcenv::VectorAction left_;
  rpcenv::HostMessage message_;  // used again, and with it its memory
};

Host::Host(EnvFactory factory, Endpoint learner, EnvDescription description, std::string name)
    : factory_(std::move(factory)),
      learner_(std::move(learner)),
      description_(std::move(description)),
      name_(std::move(name)) {}

void Host::play(std::chrono::milliseconds timeout, const std::function<void()>& on_taken) {
  const auto channel = connected_channel(learner_, timeout, [&] { return !is_stopped_; });
  if (is_stopped_) return;
  if (channel == nullptr) {
    throw NobodyAnswers("no learner answers at " + learner_.address + " within " +
                        to_string(timeout));
  }
  Stream stream(channel, learner_.credentials);
  {
    MutexLock lock(mutex_);
    stream_ = &stream;
  }
  const Finally gone([this] {  // before the stream is
    MutexLock lock(mutex_);
    stream_ = nullptr;
  });
  try {
    play(&stream, on_taken);
  } catch (...) {  // a failure, or what stop() has cancelled
    if (!is_stopped_) throw;
  }
}

// Plays until the call is over.
void Host::play(Stream* stream, const std::function<void()>& on_taken) {
  rpcenv::VectorAction first;
  if (is_stopped_) return;
  if (stream->join(description_, name_) && stream->is_taken(&first)) {
    on_taken();
    try {
      with_environment(factory_, kCloseGrace, [&](Env& env) { stream_vector(env, first, stream); });
    } catch (const std::exception& error) {  // of the environment, or an action that it cannot take
      stream->tell(error.what());
      stream->finish();
      throw EnvironmentFailure(error.what());
    }
  }
  check(stream->finish(), learner_.address);
}

void Host::stop() {
  is_stopped_ = true;
  MutexLock lock(mutex_);
  if (stream_ != nullptr) stream_->cancel();
}

}  // namespace torchbeast
