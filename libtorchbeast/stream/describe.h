// SPDX-License-Identifier: Apache-2.0
// Asks a server what it serves.

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

// Connects to `endpoint` and asks. A server that knows only the original protocol is described by
// the first step it sends, with protocol_version 0. Throws TimeoutError when none answers in time,
// std::invalid_argument when the answer makes no sense.
EnvDescription describe_server(const Endpoint& endpoint, std::chrono::milliseconds timeout);

// Makes the context of one call. The maker may keep it, to cancel the call.
using NewContext = std::function<std::shared_ptr<grpc::ClientContext>()>;

// The same over an open channel to the server at `address`. Throws LostStream too.
EnvDescription describe_server(const std::shared_ptr<grpc::Channel>& channel,
                               const std::string& address, const NewContext& new_context);

}  // namespace torchbeast
