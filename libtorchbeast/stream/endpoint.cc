// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/endpoint.h"

#include <grpc/grpc.h>
#include <grpcpp/grpcpp.h>

#include <cstdlib>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {
namespace {

constexpr int kMaxHeaderBytes = 64 << 10;  // a traceback travels as a header
constexpr auto kCancelInterval = std::chrono::milliseconds(50);

// gRPC reduces a port above 65535 to its lower 16 bits, and port 0 asks for any free port.
bool is_requested_port(int bound, const Endpoint& endpoint) {
  const auto requested = endpoint.tcp_port();
  return !requested || *requested == "0" || *requested == std::to_string(bound);
}

}  // namespace

std::optional<std::string> Endpoint::unix_path() const {
  if (!address.starts_with("unix:")) return std::nullopt;
  const std::string path = address.substr(5);
  return path.starts_with("//") ? path.substr(2) : path;
}

std::optional<std::string> Endpoint::tcp_port() const {
  const std::size_t colon = address.rfind(':');
  if (unix_path() || colon == std::string::npos) return std::nullopt;
  const std::string port = address.substr(colon + 1);
  if (port.empty() || port.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  return port;
}

// Makes gRPC wait for sockets with poll() instead of epoll, unless the user chose a strategy or
// gRPC has started already.
//
// With epoll, whichever thread is waiting receives the messages of every stream and wakes the
// thread that each belongs to. Here every stream has its own connection and its own thread; with
// poll() each thread waits for its own socket, which doubles the messages per second. gRPC reads
// the choice once, when it starts, and only from the environment. The variable is removed again
// because child processes may be servers, which are slower with poll().
void choose_polling() {
  constexpr auto kVariable = "GRPC_POLL_STRATEGY";
  static const bool chosen_by_user = [] {
    if (std::getenv(kVariable) != nullptr) return true;
    ::setenv(kVariable, "poll", 1);
    grpc_init();  // never shut down: restarting would read the variable again
    ::unsetenv(kVariable);
    return false;
  }();
  static_cast<void>(chosen_by_user);
}

std::shared_ptr<grpc::Channel> open_channel(const Endpoint& endpoint) {
  choose_polling();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(codec::kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(codec::kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, kMaxHeaderBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // One connection per stream, so that streams do not share one transport's lock.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Finds a server that starts a moment later sooner than gRPC's default of one second.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return grpc::CreateCustomChannel(endpoint.address, grpc::InsecureChannelCredentials(), arguments);
}

bool wait_for_connection(grpc::Channel& channel, std::chrono::milliseconds timeout,
                         const std::function<bool()>& keep_waiting) {
  const auto deadline = Clock::now() + timeout;
  while (keep_waiting()) {
    if (channel.WaitForConnected(std::chrono::system_clock::now() + kCancelInterval)) return true;
    if (Clock::now() >= deadline) return false;
  }
  return false;
}

std::unique_ptr<grpc::Server> start_server(const Endpoint& endpoint, grpc::Service* service) {
  int port = 0;
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(codec::kMaxMessageBytes);
  builder.SetMaxSendMessageSize(codec::kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(endpoint.address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr || port == 0 || !is_requested_port(port, endpoint)) {
    throw ConnectionError("cannot serve at " + endpoint.address +
                          ": the address is in use or cannot be bound");
  }
  return server;
}

}  // namespace torchbeast
