// SPDX-License-Identifier: Apache-2.0
// Asks a server how busy it is.

#pragma once

#include <chrono>
#include <cstdint>

#include "libtorchbeast/stream/endpoint.h"

namespace torchbeast {

// How busy a server is, see rpcenv.proto.
struct ServerStatus {
  double uptime_s = 0;
  std::int64_t open_streams = 0;
  std::int64_t steps = 0;
};

// Connects to a server and returns its status. Throws TimeoutError if no server answers in time,
// LostStream, and std::invalid_argument for an invalid answer or a server that does not tell.
ServerStatus ask_status(const Endpoint& endpoint, std::chrono::milliseconds timeout);

}  // namespace torchbeast
