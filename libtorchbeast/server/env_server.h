// SPDX-License-Identifier: Apache-2.0
// Serves environments over gRPC.

#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "libtorchbeast/server/env.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

class CallServer;

struct EnvServerOptions {
  std::string env_id = {};       // for Describe
  std::int64_t num_streams = 1;  // for Describe
  // The answer to Describe. If there is none, it is derived at the first request, from an
  // environment that is made for this purpose.
  std::optional<EnvDescription> description = {};
  // Maximum number of open streams; further ones end with RESOURCE_EXHAUSTED.
  std::int64_t max_streams = kMaxStreams;
  // How long stop() waits for messages in flight before it cancels the streams.
  std::chrono::milliseconds stop_grace = std::chrono::milliseconds(200);
  // How long stop() then waits for environments that are in the middle of a step.
  std::chrono::milliseconds step_grace = std::chrono::seconds(5);
  // How long a failed environment may take to close before its failure is printed on stderr. The
  // learner receives the failure only after the environment has closed.
  std::chrono::milliseconds close_grace = std::chrono::seconds(5);
};

// Serves environments at one endpoint. Each stream gets its own Env, which is made when the stream
// opens.
//
//   learner -> stream -> thread of the stream: Env::reset, Env::step
//
// At most max_streams streams are open at a time, and at most 32 calls of each other method. If the
// endpoint has a token, calls without it end with UNAUTHENTICATED before an Env is made.
//
// Thread safety: one thread calls run(); any thread may call the other methods. `poll` may call
// stop() too, in the thread of run(): it cannot wait for itself, so this call only requests the
// end.
// Closing: stop() ends run() even while clients are connected. It cancels their streams and waits
// for environments that are in the middle of a step. An environment that takes longer than
// step_grace is abandoned: run() returns, the address is free, and stop() throws TimeoutError. The
// abandoned thread, its environment and everything that they use live until the step returns or the
// process ends; this object may be destroyed before that.
class EnvServer {
 public:
  EnvServer(EnvFactory factory, Endpoint endpoint, EnvServerOptions options);
  ~EnvServer();
  EnvServer(const EnvServer&) = delete;
  EnvServer& operator=(const EnvServer&) = delete;

  // Serves until stop(). Throws std::runtime_error if it is running already; ConnectionError,
  // naming the address, if the address is in use or cannot be bound. This thread calls `poll` about
  // ten times a second; an exception from `poll` ends the server and is rethrown.
  void run(const std::function<void()>& poll = [] {});

  // Ends run() and waits until it is about to return; if called from within run(), only requests
  // the end. Throws std::runtime_error if the server is not running, and TimeoutError if the run
  // that it ended abandoned an environment.
  void stop() EXCLUDES(mutex_);

  // Ends run(), or the next run(), without waiting.
  void request_stop() EXCLUDES(mutex_);

  // Waits until the server is serving. Returns false after `timeout`.
  bool wait_until_serving(std::chrono::milliseconds timeout) EXCLUDES(mutex_);

 private:
  enum class State { kIdle, kStarting, kServing };
  class Service;

  void begin() EXCLUDES(mutex_);
  void serve(const std::function<void()>& poll) EXCLUDES(mutex_);
  void wait_for_stop(const std::function<void()>& poll) EXCLUDES(mutex_);
  void shut_down(std::unique_ptr<CallServer> calls) EXCLUDES(mutex_);
  void set_state(State state) EXCLUDES(mutex_);

  const Endpoint endpoint_;
  const EnvServerOptions options_;
  const EnvFactory factory_;
  Mutex mutex_;
  CondVar state_changed_;
  State state_ GUARDED_BY(mutex_) = State::kIdle;
  bool stop_requested_ GUARDED_BY(mutex_) = false;
  std::thread::id runner_ GUARDED_BY(mutex_);            // the thread in run(), if any
  std::int64_t run_number_ GUARDED_BY(mutex_) = 0;       // of the current or the last run
  std::int64_t run_left_behind_ GUARDED_BY(mutex_) = 0;  // the last to abandon an environment
};

}  // namespace torchbeast
