// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/server_status.h"

#include <grpcpp/grpcpp.h>

#include <stdexcept>

#include "libtorchbeast/proto/readable.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/stream/stream_errors.h"
#include "libtorchbeast/stream/time_limit.h"

namespace torchbeast {
namespace {

constexpr double kLongestUptime = 1e9;  // s; over thirty years

ServerStatus checked(const rpcenv::ServerStatus& message, const std::string& address) {
  const double uptime = message.uptime_s();
  const bool is_plausible = uptime >= 0 && uptime < kLongestUptime &&  // not NaN
                            message.open_streams() >= 0 && message.steps() >= 0;
  if (!is_plausible) {
    throw std::invalid_argument(
        with_origin(address, "its status must consist of numbers of at least 0"));
  }
  ServerStatus status{uptime, message.open_streams(), message.steps()};
  for (const rpcenv::HostStatus& host : message.hosts()) {
    status.hosts.push_back({readable(host.name()), host.streams(), host.envs(), host.joined_s()});
  }
  return status;
}

}  // namespace

ServerStatus ask_status(const Endpoint& endpoint, std::chrono::milliseconds timeout) {
  const auto channel = connected_channel(endpoint, timeout);
  if (channel == nullptr) throw TimeoutError(nobody_answers(endpoint.address, timeout));
  const auto stub = rpcenv::RPCServerStatus::NewStub(channel);
  rpcenv::ServerStatus message;
  const auto context = new_context(endpoint);
  TimeLimit limit(context.get(), timeout);
  const grpc::Status status = limit.status(stub->GetStatus(context.get(), {}, &message));
  if (!status.ok()) std::rethrow_exception(as_exception(status, endpoint.address));
  return checked(message, endpoint.address);
}

}  // namespace torchbeast
