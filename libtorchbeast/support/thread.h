// SPDX-License-Identifier: Apache-2.0
// Starts threads, or says which limit forbids it.

#pragma once

#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace torchbeast {

// Throws std::runtime_error with advice if the system cannot start a thread.
template <typename Body>
std::thread started_thread(Body body) {
  try {
    return std::thread(std::move(body));
  } catch (const std::system_error& error) {
    throw std::runtime_error(
        std::string("no thread can be started (") + error.what() +
        "): raise the limit of threads (ulimit -u, or pids.max of a container), or serve more "
        "environments in a stream (fewer --num_servers)");
  }
}

}  // namespace torchbeast
