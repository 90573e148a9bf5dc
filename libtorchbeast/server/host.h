// SPDX-License-Identifier: Apache-2.0
// The host's end of a stream that joins a learner's run.

#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>

#include "libtorchbeast/server/env.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// Dials a learner and lets it play environments, which are made once the learner takes the stream.
//
//   learner <-> thread in play(): Env::reset, Env::step
//
// Thread safety: one thread calls play(), as often as it likes; any thread may call stop().
// Closing: stop() ends play(), and every later one at once. Only an environment in the middle of a
// step is waited for.
class Host {
 public:
  // name: of this machine, for the learner's user.
  Host(EnvFactory factory, Endpoint learner, EnvDescription description, std::string name);
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  // Plays one stream until it ends; waits for a learner up to `timeout`. on_taken is called when
  // the learner takes the stream. Returns if the run has ended, or after stop(). Throws LostStream
  // where the host may dial again; Unauthenticated and std::invalid_argument where that is of no
  // use; EnvironmentFailure, which the learner has been told.
  void play(std::chrono::milliseconds timeout, const std::function<void()>& on_taken = [] {});

  void stop() EXCLUDES(mutex_);

 private:
  class Stream;

  void play(Stream* stream, const std::function<void()>& on_taken);

  const EnvFactory factory_;
  const Endpoint learner_;
  const EnvDescription description_;
  const std::string name_;
  std::atomic<bool> is_stopped_ = false;
  Mutex mutex_;
  Stream* stream_ GUARDED_BY(mutex_) = nullptr;  // to be cancelled
};

}  // namespace torchbeast
