// SPDX-License-Identifier: Apache-2.0
// How a stream can fail: exceptions whose message names the server.

#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <exception>
#include <string>

#include "libtorchbeast/support/errors.h"

namespace torchbeast {

// The stream ended through no fault of the environment: worth another connection.
struct LostStream : ConnectionError {
  using ConnectionError::ConnectionError;
};

// cancel() was called.
struct StreamCancelled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr char kNotAMessage[] =
    "expected a step, got bytes that are no message of the protocol";

// "environment server at ADDRESS: message", unless the message begins so already.
std::string with_origin(const std::string& address, const std::string& message);

// "5 s", or "50 ms" where it is no whole number of seconds.
std::string to_string(std::chrono::milliseconds duration);

// The message for a server that does not accept a connection within `timeout`.
std::string nobody_answers(const std::string& address, std::chrono::milliseconds timeout);

// The exception for a call that ended with `status`. OK is a LostStream too: it was not asked for.
std::exception_ptr as_exception(const grpc::Status& status, const std::string& address);

}  // namespace torchbeast
