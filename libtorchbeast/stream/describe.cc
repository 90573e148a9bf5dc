// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/describe.h"

#include <grpcpp/grpcpp.h>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/stream/stream_errors.h"
#include "libtorchbeast/stream/time_limit.h"
#include "libtorchbeast/stream/wire.h"

namespace torchbeast {
namespace {

// Derives the description of a server that does not know Describe from its first step.
EnvDescription describe_original(rpcenv::RPCEnvServer::Stub& stub, grpc::ClientContext& context,
                                 std::chrono::milliseconds timeout, const std::string& address) {
  TimeLimit limit(&context, timeout);
  const auto stream = stub.StreamingEnv(&context);
  rpcenv::Step step;
  const bool got_step = stream->Read(&step);
  stream->WritesDone();
  const grpc::Status status = limit.status(stream->Finish());
  if (!got_step && status.ok()) throw std::invalid_argument(kNotAMessage);
  if (!got_step) std::rethrow_exception(as_exception(status, address));
  return {.observation = codec::decode(step.observation()), .protocol_version = 0};
}

// RESOURCE_EXHAUSTED means that the server has too many open calls, so the client may try again.
Cause cause_of(const grpc::Status& status, const grpc::ClientContext& context,
               bool marks_failures) {
  if (context.GetServerTrailingMetadata().count(kFailureHeader) > 0) return Cause::kEnvironment;
  const bool is_exhausted = status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
  return marks_failures || is_exhausted ? Cause::kTransport : Cause::kUnknown;
}

}  // namespace

EnvDescription describe_server(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& address, std::chrono::milliseconds timeout,
                               const NewContext& new_context, bool marks_failures) {
  const auto stub = rpcenv::RPCEnvServer::NewStub(channel);
  rpcenv::Description message;
  const std::shared_ptr<grpc::ClientContext> context = new_context();
  TimeLimit limit(context.get(), timeout);
  const grpc::Status status = limit.status(stub->Describe(context.get(), {}, &message));
  try {
    if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return describe_original(*stub, *new_context(), timeout, address);
    }
    if (!status.ok()) {
      const Cause cause = cause_of(status, *context, marks_failures);
      std::rethrow_exception(as_exception(status, address, cause));
    }
    return codec::decode(message);
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(with_origin(address, error.what()));
  }
}

EnvDescription describe_server(const Endpoint& endpoint, std::chrono::milliseconds timeout) {
  const auto channel = connected_channel(endpoint, timeout);
  if (channel == nullptr) throw TimeoutError(nobody_answers(endpoint.address, timeout));
  return describe_server(channel, endpoint.address, timeout, [&] { return new_context(endpoint); });
}

}  // namespace torchbeast
