// SPDX-License-Identifier: Apache-2.0
// The interface that all protocols implement: one call, actions out, steps in.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "libtorchbeast/memory/array_ops.h"
#include "libtorchbeast/stream/credentials.h"

namespace torchbeast {

// One step of E environments as the server sent it: decoded, but not compared with the server's
// description yet. Leaves and arrays are [E, ...].
struct RawStep {
  ArrayNest observation;  // the newest frames only
  Array reward, terminated, truncated, episode_end, episode_step, episode_return;
  std::optional<ArrayNest> final_observation = {};  // leaves [K, ...], of the K truncated ones
  std::optional<Array> info = {};                   // see VectorStep.info in rpcenv.proto
};

// Metadata after a call: says that the environment, or the code that makes it, raised an exception.
inline constexpr char kFailureHeader[] = "torchbeast-environment-failed";

// One call in one protocol, at the learner's end: actions out, steps in.
//
//   start() -> read() -> write(), read() -> write(), read() ...  half_close() -> finish()
//
// Thread safety: one thread; any thread may call cancel(), even before start(). It ends every
// blocking call. read() throws std::invalid_argument if a message cannot be decoded.
class Wire {
 public:
  virtual ~Wire() = default;
  // start() and write() return false, and read() nullopt, once the call is over; finish() then
  // returns the reason.
  virtual bool start(std::uint64_t seed) = 0;
  virtual bool write(const ArrayNest& action) = 0;  // leaves [1, E, ...]
  // Sends options, see VectorAction.env_options, with the next start() or write(). A protocol
  // without options drops them.
  virtual void give_options(const std::string&) {}
  virtual std::optional<RawStep> read() = 0;
  virtual void half_close() = 0;  // tells the other end that no more actions follow
  virtual grpc::Status finish() = 0;
  // Returns whether the other end said that the environment failed. Call it after finish().
  virtual bool environment_failed() const = 0;
  virtual void cancel() = 0;
};

// A call to a server. It carries the token of the credentials.
class ClientWire : public Wire {
 public:
  explicit ClientWire(const Credentials& credentials) { add_token(credentials, &context_); }
  bool environment_failed() const override {
    return context_.GetServerTrailingMetadata().count(kFailureHeader) > 0;
  }
  void cancel() override { context_.TryCancel(); }

 protected:
  grpc::ClientContext context_;
};

// Returns a call's final status. Before that, reads the remaining messages, because gRPC delivers
// the status after them.
template <typename Stream, typename Message>
grpc::Status drained_status(Stream* stream, Message* message) {
  if (stream == nullptr) return grpc::Status::CANCELLED;
  while (stream->Read(message)) continue;
  return stream->Finish();
}

}  // namespace torchbeast
