// SPDX-License-Identifier: Apache-2.0
// Where a server listens, and how the connection is protected. This file makes every channel and
// every listening port.

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

// An address, for the listening end and for the connecting end, and the credentials of that end:
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
  // The address without NAME@, for gRPC.
  std::string target() const;
  // NAME, if the address has one.
  std::optional<std::string> tls_name() const;

  std::string address;
  Credentials credentials;
};

// Opens a channel with its own connection. Returns immediately, connected or not. If a peer over
// TCP does not answer anything, not even the pings of the transport, the connection is given up
// after half a minute.
std::shared_ptr<grpc::Channel> open_channel(const Endpoint& endpoint);

// Opens such a channel, and tries until it is connected. Returns null once `timeout` has passed, or
// once keep_waiting() returns false; it is called at least every 50 ms.
//
// Does not use gRPC's timers. The timers of gRPC 1.51 wait until a time of the system's clock: if
// the clock is set back, neither running nor new timers end until it has caught up.
std::shared_ptr<grpc::Channel> connected_channel(
    const Endpoint& endpoint, std::chrono::milliseconds timeout,
    const std::function<bool()>& keep_waiting = [] { return true; });

// Makes the context of a call to the endpoint, with the endpoint's token. See TimeLimit.
std::unique_ptr<grpc::ClientContext> new_context(const Endpoint& endpoint);

// Maximum number of a server's open streams, by default.
inline constexpr std::int64_t kMaxStreams = 1024;

// Longest time that a connection may stay open without a call, by default. Our clients make a call
// as soon as they have connected.
inline constexpr std::chrono::milliseconds kMaxIdle{60'000};

// Listens at the endpoint and serves what is registered with `builder`. What is registered must
// check the tokens of its calls itself. Throws ConnectionError, naming the address, if the address
// is in use or cannot be bound, or if certificate and key cannot be used. max_idle: how long a
// connection may stay open without a call.
std::unique_ptr<grpc::Server> start_server(const Endpoint& endpoint, grpc::ServerBuilder* builder,
                                           std::chrono::milliseconds max_idle = kMaxIdle);

// Configures gRPC's polling, once for the process; open_channel() and start_server() also do it.
//
// Sets and unsets an environment variable, which no other thread should access at the same time: if
// possible, call it before you start threads.
void choose_polling();

}  // namespace torchbeast
