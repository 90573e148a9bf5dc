// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/stream_errors.h"

#include "libtorchbeast/proto/readable.h"

namespace torchbeast {
namespace {

// Whether gRPC ended a call for a reason that another connection need not have. A message above the
// limit would be sent again.
bool is_passing(const grpc::Status& status) {
  switch (status.error_code()) {
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:
      return true;
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
      return status.error_message().find("larger than max") == std::string::npos;
    default:
      return false;
  }
}

std::string said_in(const grpc::Status& status) { return readable(status.error_message()); }

// Cuts the middle out of a long text. A peer can make us quote as much as a message may have.
std::string without_middle(const std::string& text) {
  constexpr std::size_t kHalf = 32 << 10;
  if (text.size() <= 2 * kHalf) return text;
  return text.substr(0, kHalf) + " ... " + text.substr(text.size() - kHalf);
}

std::string origin_at(const std::string& address) {
  return "environment server at " + address + ": ";
}

std::exception_ptr lost(const grpc::Status& status, const std::string& address) {
  const std::string said = said_in(status);
  return std::make_exception_ptr(
      LostStream(with_origin(address, "connection lost (" + said + ")")));
}

}  // namespace

std::string to_string(std::chrono::milliseconds duration) {
  const auto count = duration.count();
  return count % 1000 == 0 ? std::to_string(count / 1000) + " s" : std::to_string(count) + " ms";
}

std::string with_origin(const std::string& address, const std::string& message) {
  const std::string origin = origin_at(address), shown = readable(without_middle(message));
  return shown.starts_with(origin) ? shown : origin + shown;
}

std::string nobody_answers(const std::string& address, std::chrono::milliseconds timeout) {
  return "no environment server answers at " + address + " within " + to_string(timeout) +
         "; start one there, or name the address of one that runs";
}

std::string said_by_server(const std::exception& error, const std::string& address) {
  if (dynamic_cast<const NobodyAnswers*>(&error) != nullptr) return "";
  const std::string message = error.what(), origin = origin_at(address);
  return message.starts_with(origin) ? message.substr(origin.size()) : message;
}

std::exception_ptr as_exception(const grpc::Status& status, const std::string& address,
                                Cause cause) {
  if (cause == Cause::kTransport && is_passing(status)) return lost(status, address);
  const std::string message = with_origin(address, said_in(status));
  switch (status.error_code()) {
    case grpc::StatusCode::INTERNAL:
    case grpc::StatusCode::UNKNOWN:  // what grpcio answers when a Python server raises
      return std::make_exception_ptr(EnvironmentFailure(message));
    case grpc::StatusCode::INVALID_ARGUMENT:
    case grpc::StatusCode::FAILED_PRECONDITION:
    case grpc::StatusCode::RESOURCE_EXHAUSTED:
    case grpc::StatusCode::UNIMPLEMENTED:
      return std::make_exception_ptr(std::invalid_argument(message));
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return std::make_exception_ptr(
          Unresponsive(with_origin(address, "it accepts connections but does not answer")));
    case grpc::StatusCode::UNAUTHENTICATED:
      return std::make_exception_ptr(Unauthenticated(message));
    case grpc::StatusCode::OK:
      return std::make_exception_ptr(LostStream(with_origin(address, "it ended the stream")));
    default:
      return lost(status, address);
  }
}

}  // namespace torchbeast
