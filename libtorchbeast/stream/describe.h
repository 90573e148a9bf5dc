// SPDX-License-Identifier: Apache-2.0
// Asks a server which environments it serves.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "libtorchbeast/proto/description.h"
#include "libtorchbeast/stream/endpoint.h"

namespace torchbeast {

// Connects to a server and returns its description. For a server that knows only the original
// protocol, the description is derived from its first step and has protocol_version 0. Throws
// TimeoutError if no server answers in time, std::invalid_argument for an invalid answer.
EnvDescription describe_server(const Endpoint& endpoint, std::chrono::milliseconds timeout);

// Makes the context of one call. The function may keep the context in order to cancel the call.
using NewContext = std::function<std::shared_ptr<grpc::ClientContext>()>;

// Returns the description of the server at `address` over a connected channel. timeout: for each
// call. marks_failures: whether the server is known to mark failures of its environments; all other
// failures are then gRPC's. Can also throw LostStream.
EnvDescription describe_server(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& address, std::chrono::milliseconds timeout,
                               const NewContext& new_context, bool marks_failures = false);

}  // namespace torchbeast
