// SPDX-License-Identifier: Apache-2.0
// Decides what follows when a stream's connection ends: a new connection, retirement of the stream,
// or the end of the run.

#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <string>

#include "libtorchbeast/acting/backoff.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

struct RetryOptions {
  // How long a stream may take to connect at the start. Later connections have reconnect_timeout,
  // but at most 5 s.
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(1);
  std::chrono::milliseconds reconnect_timeout = std::chrono::minutes(1);
  int fruitless_connections = 10;  // in a row without a rollout, after which a stream is retired
  int failures = 5;                // of environments, after which a stream is retired ...
  std::chrono::milliseconds failure_window = std::chrono::minutes(10);  // ... within this time
};

// Says what follows the end of a connection.
struct Verdict {
  enum class Next { kConnectAgain, kRetire, kEndRun } next = Next::kConnectAgain;
  std::string why = {};  // continues the message of the error that ended the connection
  int failures = 0;      // of the environments within the window, if they failed
};

// The history of one stream's connections.
//
//   connecting --> came_up() --> completed_rollout() ... --> lost() or failed() --> Verdict
//       ^                                                                             |
//       +------------------------------- after pause() <-------- kConnectAgain -------+
//
// If a stream that has never completed a rollout fails for good, or if its environments fail once,
// the run ends, because the server or the environment is probably broken. A stream that has
// completed a rollout is retired instead.
//
// Thread safety: one thread.
class StreamHistory {
 public:
  StreamHistory(RetryOptions options, std::uint64_t seed);

  // The number of the current connection, counted from 0.
  std::uint64_t connection() const { return connection_; }
  // The number of the current connection's first rollout.
  std::int64_t first_rollout() const { return first_rollout_; }
  // How long the current connection may take until the server accepts it.
  std::chrono::milliseconds patience() const;
  // Whether the current connection came up.
  bool is_up() const { return is_up_; }
  // Whether the stream may be away, because it has come up before.
  bool may_be_away() const { return may_be_away_; }

  // Records that the current connection has brought its first step.
  void came_up();
  void completed_rollout() { ++rollouts_; }

  // Records that the current connection ended, because it was lost or because the environments
  // failed. The next connection begins.
  Verdict lost();
  Verdict failed();
  // How long to wait before the next connection. Call it after lost() or failed().
  std::chrono::milliseconds pause() const { return pause_; }

 private:
  void end_connection();
  int count_failure();
  Verdict::Next give_up() const;

  const RetryOptions options_;
  const Clock::time_point since_ = Clock::now();
  std::uint64_t connection_ = 0;
  std::int64_t first_rollout_ = 0;
  std::int64_t rollouts_ = 0;  // of the current connection
  int fruitless_ = 0;          // consecutive connections that ended before their first rollout
  bool is_up_ = false;
  bool may_be_away_ = false;
  bool is_proven_ = false;  // has completed a rollout
  std::deque<Clock::time_point> failures_;
  Backoff backoff_;
  std::chrono::milliseconds pause_{};
};

}  // namespace torchbeast
