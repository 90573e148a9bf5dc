// SPDX-License-Identifier: Apache-2.0
// Where a server listens, and how the connection is protected. Every channel and every listening
// port is made here.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "libtorchbeast/stream/credentials.h"

namespace torchbeast {

// An address for the end that listens and the end that connects, and that end's credentials:
//
//   unix:PATH        a socket file, protected by the permissions of its folder
//   HOST:PORT        a TCP port, protected by the credentials
//   NAME@HOST:PORT   likewise, for the end that connects: the server's certificate must name NAME
//                    instead of HOST, which is one of several addresses of NAME
//
// TCP without credentials is neither encrypted nor authenticated: anyone who can reach the port is
// trusted.
struct Endpoint {
  // Throws std::invalid_argument for credentials that cannot be used.
  Endpoint(std::string address, Credentials credentials = {});  // NOLINT: an address is enough

  // The path of the socket file; none for a TCP port.
  std::optional<std::string> unix_path() const;
  // The TCP port; none for a Unix socket, or if the address does not end in a number.
  std::optional<std::string> tcp_port() const;
  // The address without NAME@, as gRPC takes it.
  std::string target() const;
  // NAME, if the address has one.
  std::optional<std::string> tls_name() const;

  std::string address;
  Credentials credentials;
};

// Opens a channel with a connection of its own. Returns at once, connected or not. A peer over TCP
// that answers nothing, not even the pings of the transport, is given up after half a minute.
std::shared_ptr<grpc::Channel> open_channel(const Endpoint& endpoint);

// Opens such a channel, and tries until it is connected. Returns null once `timeout` has passed, or
// once keep_waiting(), called at least every 50 ms, returns false.
//
// Needs none of gRPC's timers. Those of gRPC 1.51 wait until a time of the system's clock: after it
// is set back, neither running nor new timers end until it has caught up.
std::shared_ptr<grpc::Channel> connected_channel(
    const Endpoint& endpoint, std::chrono::milliseconds timeout,
    const std::function<bool()>& keep_waiting = [] { return true; });

// Makes the context of a call to the endpoint, which carries its token. See TimeLimit.
std::unique_ptr<grpc::ClientContext> new_context(const Endpoint& endpoint);

// Streams of a server that may be open at once, by default.
inline constexpr std::int64_t kMaxStreams = 1024;

// Longest time that a connection may stay open without a call, by default. Whoever connects calls
// at once.
inline constexpr std::chrono::milliseconds kMaxIdle{60'000};

// Listens at the endpoint and serves what is registered with `builder`, which must check the tokens
// of its calls itself. Throws ConnectionError, naming the address, when it is in use or cannot be
// bound, or if certificate and key cannot be used. max_idle: after so long without any call a
// connection is closed.
std::unique_ptr<grpc::Server> start_server(const Endpoint& endpoint, grpc::ServerBuilder* builder,
                                           std::chrono::milliseconds max_idle = kMaxIdle);

// Configures gRPC's polling for a process, once; open_channel() and start_server() do it too.
//
// Sets and unsets an environment variable, which no other thread should access meanwhile: call it
// before starting threads where possible.
void choose_polling();

}  // namespace torchbeast
