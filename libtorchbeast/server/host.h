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

// Dials a learner and lets it play environments. They are made when the learner takes the stream.
//
//   learner <-> thread in play(): Env::reset, Env::step
//
// Thread safety: one thread calls play(), any number of times; any thread may call stop().
// Closing: stop() ends play(), and ends every later play() immediately. It waits only for an
// environment that is in the middle of a step.
class Host {
 public:
  // name: the name of this machine, which the learner shows to its user.
  Host(EnvFactory factory, Endpoint learner, EnvDescription description, std::string name);
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  // Plays one stream until it ends; waits up to `timeout` for a learner. Calls on_taken when the
  // learner takes the stream. Returns if the run has ended, or after stop(). Throws LostStream if
  // the host may dial again; Unauthenticated or std::invalid_argument if dialling again would not
  // help; and EnvironmentFailure, after the learner has been told about it.
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
