// SPDX-License-Identifier: Apache-2.0
// Decides what follows when a stream's connection ends: another one, retirement, or the run's end.

#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <string>

#include "libtorchbeast/acting/backoff.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

struct RetryOptions {
  // For a stream of the start to come up. Later, connections have reconnect_timeout, 5 s at most.
  std::chrono::milliseconds connect_timeout = std::chrono::minutes(1);
  std::chrono::milliseconds reconnect_timeout = std::chrono::minutes(1);
  int fruitless_connections = 10;  // most in a row that end before their first rollout
  int failures = 5;                // of environments, that retire a stream ...
  std::chrono::milliseconds failure_window = std::chrono::minutes(10);  // ... within this time
};

// What follows the end of a connection.
struct Verdict {
  enum class Next { kConnectAgain, kRetire, kEndRun } next = Next::kConnectAgain;
  std::string why = {};  // continues the message of what ended the connection
  int failures = 0;      // of the environments within the window, if they failed
};

// The connections of one stream.
//
//   connecting --> came_up() --> completed_rollout() ... --> lost() or failed() --> Verdict
//       ^                                                                             |
//       +------------------------------- after pause() <-------- kConnectAgain -------+
//
// A stream that never completed a rollout ends the run, for its server or its environment is
// probably broken. One that did is retired instead.
//
// Thread safety: one thread.
class StreamHistory {
 public:
  StreamHistory(RetryOptions options, std::uint64_t seed);

  // The number of the current connection, from 0.
  std::uint64_t connection() const { return connection_; }
  // The number of the current connection's first rollout.
  std::int64_t first_rollout() const { return first_rollout_; }
  // How long the current connection may take to be accepted.
  std::chrono::milliseconds patience() const;
  // Whether the current connection came up.
  bool is_up() const { return is_up_; }
  // Whether the stream may be away: it came up before.
  bool may_be_away() const { return may_be_away_; }

  // The current connection brought its first step.
  void came_up();
  void completed_rollout() { ++rollouts_; }

  // The current connection ended: was lost, or the environments failed. The next one begins.
  Verdict lost();
  Verdict failed();
  // How long to wait before the next connection; after lost() or failed().
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
  int fruitless_ = 0;          // connections in a row that ended before their first rollout
  bool is_up_ = false;
  bool may_be_away_ = false;
  bool is_proven_ = false;  // completed a rollout
  std::deque<Clock::time_point> failures_;
  Backoff backoff_;
  std::chrono::milliseconds pause_{};
};

}  // namespace torchbeast
