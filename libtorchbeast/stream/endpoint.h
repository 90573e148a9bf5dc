// SPDX-License-Identifier: Apache-2.0
// Where a server listens. Every channel and every listening port is made here.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/server.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace torchbeast {

// An address, "unix:PATH" or "HOST:PORT", for the end that listens and the end that connects.
//
// Connections are neither encrypted nor authenticated: anyone who may open the socket file, or
// reach the port, is trusted.
struct Endpoint {
  Endpoint(std::string address) : address(std::move(address)) {}  // NOLINT: an address is enough

  // The path of the socket file; none for a TCP port.
  std::optional<std::string> unix_path() const;
  // The TCP port; none for a Unix socket, or if the address does not end in a number.
  std::optional<std::string> tcp_port() const;

  std::string address;
};

// Opens a channel with a connection of its own. Returns at once, connected or not.
std::shared_ptr<grpc::Channel> open_channel(const Endpoint& endpoint);

// Waits until the channel is connected. Returns false once `timeout` has passed, or once
// keep_waiting(), called every 50 ms, returns false.
bool wait_for_connection(
    grpc::Channel& channel, std::chrono::milliseconds timeout,
    const std::function<bool()>& keep_waiting = [] { return true; });

// Listens at the endpoint and serves `service`, which must outlive the server. Throws
// ConnectionError, naming the address, when it is in use or cannot be bound.
std::unique_ptr<grpc::Server> start_server(const Endpoint& endpoint, grpc::Service* service);

// Configures gRPC's polling for a client process, once; open_channel() does it too.
//
// Sets and unsets an environment variable, which no other thread should access meanwhile: call it
// before starting threads where possible.
void choose_polling();

}  // namespace torchbeast
