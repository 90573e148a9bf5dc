// SPDX-License-Identifier: Apache-2.0
// The learner's end of one stream of steps.

#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "libtorchbeast/proto/description.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/stream/stream_errors.h"
#include "libtorchbeast/stream/wire.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// One step of a stream's E environments, as policy and learner see it: leaves [1, E, ...], frames
// stacked.
struct StreamStep {
  ArrayNest observation;
  Array reward;                                     // float32 [1, E]
  Array done;                                       // bool [1, E]: terminated or truncated
  Array episode_step;                               // int32 [1, E]
  Array episode_return;                             // float32 [1, E]
  Array terminated;                                 // bool [1, E]
  Array truncated;                                  // bool [1, E]
  Array episode_end;                                // bool [1, E]
  std::optional<ArrayNest> final_observation = {};  // leaves [K, ...], in the order of e
};

// A stream's life:
//
//   connect(seed) -> first step -> step(action) -> step -> step(action) -> step ...   close()
//
// Everything the server sends is checked before it is used; every step must look like the first.
//
// Thread safety: one thread uses the stream; cancel() and cancel_if_overdue() may come from
// another. Ending: cancel() ends whatever blocks, with StreamCancelled. No wait is without a limit
// as long as somebody calls cancel_if_overdue() now and then.
class EnvStream {
 public:
  EnvStream(Endpoint endpoint, std::chrono::milliseconds step_timeout);
  ~EnvStream();
  EnvStream(const EnvStream&) = delete;
  EnvStream& operator=(const EnvStream&) = delete;

  // Connects, and waits for the first step. Throws LostStream when nobody answers in `timeout`,
  // and as step().
  StreamStep connect(std::uint64_t seed, std::chrono::milliseconds timeout);

  // Sends action leaves [1, E, ...] and waits for what they lead to. Throws LostStream,
  // TimeoutError after step_timeout, EnvironmentFailure with the environment's traceback,
  // std::invalid_argument for a step that makes no sense, bytes that are no message included. Each
  // message names the address.
  StreamStep step(const ArrayNest& action);

  std::int64_t num_envs() const { return description_.num_envs; }

  // Ends the stream in order: the server sees the end and returns OK.
  void close();

  void cancel();
  // Cancels a step that has been waited for longer than step_timeout, and an ended call whose
  // reason does not come.
  void cancel_if_overdue();

 private:
  class Translation;

  template <typename Call>
  StreamStep waiting(const Call& call);
  EnvDescription describe(const std::shared_ptr<grpc::Channel>& channel);
  [[noreturn]] void fail();
  [[noreturn]] void throw_overdue(bool ended) const;
  void wait_at_most(std::chrono::milliseconds limit);
  void check_cancelled() const;

  const Endpoint endpoint_;
  const std::chrono::milliseconds step_timeout_;
  EnvDescription description_;
  std::unique_ptr<Translation> translation_;
  Mutex mutex_;  // taken to replace or to cancel the two calls below; the stream's own thread
                 // alone replaces them, so it reads them without
  std::unique_ptr<Wire> wire_;
  std::shared_ptr<grpc::ClientContext> describing_;
  std::atomic<bool> cancelled_ = false;
  std::atomic<bool> overdue_ = false;
  std::atomic<Clock::rep> overdue_at_ = 0;  // 0: nothing is waited for
};

}  // namespace torchbeast
