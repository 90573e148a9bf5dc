// SPDX-License-Identifier: Apache-2.0
// The exceptions of streams. Their messages name the server.

#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <exception>
#include <string>

#include "libtorchbeast/support/errors.h"

namespace torchbeast {

// The stream ended for a reason other than the environment, so reconnecting may help.
struct LostStream : ConnectionError {
  using ConnectionError::ConnectionError;
};

// No server accepted the connection.
struct NobodyAnswers : LostStream {
  using LostStream::LostStream;
};

// The server admits only clients with a token, and this client does not have the right one.
struct Unauthenticated : LostStream {
  using LostStream::LostStream;
};

// The server accepted the connection but did not send anything in time, probably because an
// environment hangs.
struct Unresponsive : TimeoutError {
  using TimeoutError::TimeoutError;
};

// EnvStream::cancel() was called.
struct StreamCancelled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline constexpr char kNotAMessage[] =
    "expected a step, got bytes that are no message of the protocol";

// Prefixes a message with "environment server at ADDRESS: ", unless it already begins so, and makes
// it safe to show, because it may quote the peer: without control characters, and 64 KiB long at
// most.
std::string with_origin(const std::string& address, const std::string& message);

// Formats a duration: "5 s", or "50 ms" if it is not a whole number of seconds.
std::string to_string(std::chrono::milliseconds duration);

// Returns the error message for a server that does not accept a connection within `timeout`.
std::string nobody_answers(const std::string& address, std::chrono::milliseconds timeout);

// Returns a stream's error message without its prefix; empty if no server answered.
std::string said_by_server(const std::exception& error, const std::string& address);

// Who ended a call, if its status alone does not show it: gRPC itself ends calls with INTERNAL (a
// reset), UNKNOWN ("Stream removed") and RESOURCE_EXHAUSTED. Servers of earlier versions do not say
// who did.
enum class Cause { kUnknown, kEnvironment, kTransport };

// Returns the exception for a call that the server ended with `status`. OK becomes LostStream too,
// because the learner did not ask for the end of the call.
std::exception_ptr as_exception(const grpc::Status& status, const std::string& address,
                                Cause cause = Cause::kUnknown);

}  // namespace torchbeast
