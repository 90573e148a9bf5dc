// SPDX-License-Identifier: Apache-2.0
// Asks a server how busy it is.

#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "libtorchbeast/stream/endpoint.h"

namespace torchbeast {

// A host that has joined a learner.
struct HostStatus {
  std::string name;
  std::int64_t streams, envs;
  double joined_s;  // since its first stream joined
};

// How busy a server is, see rpcenv.proto.
struct ServerStatus {
  double uptime_s = 0;
  std::int64_t open_streams = 0;
  std::int64_t steps = 0;
  std::vector<HostStatus> hosts = {};  // of a learner that hosts have joined
};

// Connects to a server and returns its status. Throws TimeoutError if no server answers in time;
// LostStream; and std::invalid_argument if the answer is invalid or the server does not report its
// status.
ServerStatus ask_status(const Endpoint& endpoint, std::chrono::milliseconds timeout);

}  // namespace torchbeast
