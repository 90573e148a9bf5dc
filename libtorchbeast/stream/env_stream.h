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
#include "libtorchbeast/stream/translation.h"
#include "libtorchbeast/stream/wire.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// A connection to one environment server, in either protocol, or to a host that has joined.
//
//   connect(seed) -> first step -> step(action) -> step -> step(action) -> step ...   close()
//   begin(seed)
//
// Everything that the other end sends is checked against its description before it is used.
//
// Thread safety: one thread uses the stream; any thread may call cancel() and cancel_if_overdue().
// Closing: close() ends the stream cleanly; cancel() ends every blocking call with StreamCancelled.
// Every wait has a limit, provided that some thread calls cancel_if_overdue() regularly. The one
// exception is close(), which waits for the server's status until cancel().
class EnvStream {
 public:
  // described: the description of the server of the stream's earlier connection; if there is none,
  // any server is accepted.
  EnvStream(Endpoint endpoint, std::chrono::milliseconds step_timeout,
            std::optional<EnvDescription> described = {});
  // The stream of a host that has joined and has described itself. Everything that the host does
  // wrong is LostStream, except that an environment fails or takes too long.
  EnvStream(const std::string& host, std::chrono::milliseconds step_timeout,
            EnvDescription description, std::unique_ptr<Wire> wire);
  ~EnvStream();
  EnvStream(const EnvStream&) = delete;
  EnvStream& operator=(const EnvStream&) = delete;

  // Connects and waits for the first step. Throws LostStream if no server answers within `timeout`,
  // and std::invalid_argument, before an environment is made, if the server does not serve the same
  // as the stream's earlier connection. Otherwise throws like step().
  StreamStep connect(std::uint64_t seed, std::chrono::milliseconds timeout);

  // Takes the stream of a host that has joined, and waits for its first step. Throws like step().
  StreamStep begin(std::uint64_t seed);

  // Sends an action, leaves [1, E, ...], and waits for the resulting step. Throws LostStream;
  // Unresponsive after step_timeout; EnvironmentFailure with the environment's traceback if the
  // server says that the environment failed; std::invalid_argument if the step is invalid or the
  // bytes are not a message. All messages contain the address.
  StreamStep step(const ArrayNest& action);

  // Sends options for the resets of the environments, a JSON object, with the next message.
  void give_options(const std::string& json);

  // The server's address, or the host's name.
  const Endpoint& endpoint() const { return endpoint_; }
  // The server's description; after connect().
  const EnvDescription& description() const { return description_; }
  std::int64_t num_envs() const { return description_.num_envs; }

  // Ends the stream cleanly: the server sees the half-close and returns OK.
  void close();

  // Ends the call in progress, and prevents any other.
  void cancel();
  // Cancels a step that takes longer than step_timeout, and an ended call whose status does not
  // arrive.
  void cancel_if_overdue();

 private:
  template <typename Call>
  StreamStep waiting(const Call& call);
  EnvDescription describe(const std::shared_ptr<grpc::Channel>& channel);
  void check_same_as_before() const;
  [[noreturn]] void fail();
  [[noreturn]] void throw_invalid(const char* what) const;
  [[noreturn]] void throw_overdue(bool ended) const;
  void wait_at_most(std::chrono::milliseconds limit);
  void check_cancelled() const;

  const Endpoint endpoint_;
  const std::chrono::milliseconds step_timeout_;
  const std::optional<EnvDescription> described_;
  const bool has_joined_;
  EnvDescription description_;
  std::string options_;  // for the first message
  std::unique_ptr<StepTranslation> translation_;
  // Held while the two calls below are replaced or cancelled. Only the stream's own thread replaces
  // them, so it may read them without the lock.
  Mutex mutex_;
  std::unique_ptr<Wire> wire_;
  std::shared_ptr<grpc::ClientContext> describing_;
  std::atomic<bool> cancelled_ = false;
  std::atomic<bool> overdue_ = false;
  std::atomic<Clock::rep> overdue_at_ = 0;  // 0: not waiting
};

}  // namespace torchbeast
