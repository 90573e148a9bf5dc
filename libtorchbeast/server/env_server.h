// SPDX-License-Identifier: Apache-2.0
// The gRPC service around an Env.

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "libtorchbeast/server/env.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

struct EnvServerOptions {
  std::string env_id = {};       // for Describe
  std::int64_t num_streams = 1;  // for Describe
  // What Describe answers. None: made from an environment of its own at the first question.
  std::optional<EnvDescription> description = {};
  // How long stop() lets a message in flight finish before streams are cancelled.
  std::chrono::milliseconds stop_grace = std::chrono::milliseconds(200);
  // How long stop() then waits for the step that an environment is in the middle of.
  std::chrono::milliseconds step_grace = std::chrono::seconds(5);
};

// Serves environments at one address: one environment for each stream, made when it opens.
//
//   learner -> stream -> thread of the stream: Env::reset, Env::step
//
// Thread safety: run() in one thread; stop() and wait_until_serving() from any.
// Closing: stop() ends run(), also with clients connected. Their streams are cancelled; an
// environment that is in a step is waited for. One that hangs longer than step_grace is left
// behind: run() returns, nobody serves the address any more, and stop() throws TimeoutError. The
// thread that hangs, its environment and what they need live on until the step returns, at the
// longest as the process; this object may go before.
class EnvServer {
 public:
  EnvServer(EnvFactory factory, Endpoint endpoint, EnvServerOptions options);
  ~EnvServer();
  EnvServer(const EnvServer&) = delete;
  EnvServer& operator=(const EnvServer&) = delete;

  // Blocks until stop(). Throws std::runtime_error "Server already running" and ConnectionError,
  // naming the address, when it is served by another or cannot be bound. `poll` is called about
  // ten times a second in this thread; what it throws ends the server.
  void run(const std::function<void()>& poll = [] {});

  // Returns when run() is about to. Throws std::runtime_error "Server not running", and
  // TimeoutError when an environment was left behind.
  void stop() EXCLUDES(mutex_);

  // Ends run(), or the next run(), without waiting for it.
  void request_stop() EXCLUDES(mutex_);

  // False when the server does not serve within the timeout.
  bool wait_until_serving(std::chrono::milliseconds timeout) EXCLUDES(mutex_);

 private:
  enum class State { kIdle, kStarting, kServing };
  class Service;

  void begin() EXCLUDES(mutex_);
  void serve(const std::function<void()>& poll) EXCLUDES(mutex_);
  void wait_for_stop(const std::function<void()>& poll) EXCLUDES(mutex_);
  void shut_down(std::unique_ptr<grpc::Server> server, std::shared_ptr<Service> service)
      EXCLUDES(mutex_);
  void set_state(State state) EXCLUDES(mutex_);

  const Endpoint endpoint_;
  const EnvServerOptions options_;
  const EnvFactory factory_;
  Mutex mutex_;
  CondVar state_changed_;
  State state_ GUARDED_BY(mutex_) = State::kIdle;
  bool stop_requested_ GUARDED_BY(mutex_) = false;
  bool left_behind_ GUARDED_BY(mutex_) = false;  // an environment, at the last stop
};

}  // namespace torchbeast
