// SPDX-License-Identifier: Apache-2.0
// What the two protocols have in common: one call, steps in, actions out.

#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "libtorchbeast/memory/array_ops.h"

namespace torchbeast {

// One step of E environments as a server sent it, decoded but not yet compared with what was
// expected. Leaves and arrays are [E, ...].
struct RawStep {
  ArrayNest observation;  // the newest frames only
  Array reward, terminated, truncated, episode_end, episode_step, episode_return;
  std::optional<ArrayNest> final_observation = {};  // leaves [K, ...], K truncated environments
};

// One call to a server in one protocol.
//
//   start() -> read() -> write(), read() -> write(), read() ...  half_close() -> finish()
//
// Thread safety: one thread; cancel() from any, also before start(). Calls that block end with the
// call. Decoding throws std::invalid_argument.
class Wire {
 public:
  virtual ~Wire() = default;
  // start() and write() return false, and read() nothing, once the call is over; finish() then says
  // why.
  virtual bool start(std::uint64_t seed) = 0;
  virtual bool write(const ArrayNest& action) = 0;  // leaves [1, E, ...]
  virtual std::optional<RawStep> read() = 0;
  virtual void half_close() = 0;  // no more actions
  virtual grpc::Status finish() = 0;
  void cancel() { context_.TryCancel(); }

 protected:
  grpc::ClientContext context_;
};

// Ends a call and returns its status. Reads what is left first: unread messages hold the status
// back.
template <typename Stream, typename Message>
grpc::Status drained_status(Stream* stream, Message* message) {
  if (stream == nullptr) return grpc::Status::CANCELLED;
  while (stream->Read(message)) continue;
  return stream->Finish();
}

}  // namespace torchbeast
