// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/stream_history.h"

#include <algorithm>
#include <utility>

#include "libtorchbeast/stream/stream_errors.h"

namespace torchbeast {
namespace {

constexpr std::chrono::milliseconds kFirstPause(100);  // before another connection
constexpr std::chrono::milliseconds kLongestPause(5000);

std::string fruitless(int connections) {
  return "; this was connection " + std::to_string(connections) +
         " in a row that ended before its first rollout: look into that server's log";
}

std::string never_up(std::uint64_t connections, std::chrono::milliseconds timeout) {
  return "; this was connection " + std::to_string(connections) +
         ", and none brought a first step within " + to_string(timeout) +
         ": look into that server's log";
}

}  // namespace

StreamHistory::StreamHistory(RetryOptions options, std::uint64_t seed)
    : options_(options), backoff_(kFirstPause, kLongestPause, seed) {}

std::chrono::milliseconds StreamHistory::patience() const {
  if (may_be_away_) return std::min(kLongestPause, options_.reconnect_timeout);
  if (connection_ == 0) return options_.connect_timeout;  // whole, as the error says
  return std::chrono::ceil<std::chrono::milliseconds>(options_.connect_timeout -
                                                      (Clock::now() - since_));
}

void StreamHistory::came_up() {
  is_up_ = true;
  may_be_away_ = true;
}

Verdict StreamHistory::lost() {
  const bool was_up = is_up_;
  if (was_up) fruitless_ = rollouts_ > 0 ? 0 : fruitless_ + 1;
  end_connection();
  if (fruitless_ >= options_.fruitless_connections) return {give_up(), fruitless(fruitless_)};
  if (may_be_away_) return {};
  if (Clock::now() - since_ + pause_ < options_.connect_timeout) return {};
  if (connection_ == 1) return {Verdict::Next::kEndRun};
  return {Verdict::Next::kEndRun, never_up(connection_, options_.connect_timeout)};
}

Verdict StreamHistory::failed() {
  fruitless_ = rollouts_ > 0 ? 0 : fruitless_ + 1;
  end_connection();
  if (!is_proven_) return {Verdict::Next::kEndRun};
  may_be_away_ = true;
  const int failures = count_failure();
  if (failures >= options_.failures) return {Verdict::Next::kRetire, "", failures};
  if (fruitless_ < options_.fruitless_connections)
    return {Verdict::Next::kConnectAgain, "", failures};
  return {Verdict::Next::kRetire, fruitless(fruitless_), failures};
}

// The numbers of rollouts leave one out, so that no two with successive numbers have a gap between
// them.
void StreamHistory::end_connection() {
  if (rollouts_ > 0) {
    first_rollout_ += rollouts_ + 1;
    is_proven_ = true;
    backoff_.restart();
  }
  ++connection_;
  rollouts_ = 0;
  is_up_ = false;
  pause_ = backoff_.next();
}

// Returns how many there were within the window, this one included.
int StreamHistory::count_failure() {
  const auto now = Clock::now();
  failures_.push_back(now);
  while (now - failures_.front() > options_.failure_window) failures_.pop_front();
  return static_cast<int>(failures_.size());
}

Verdict::Next StreamHistory::give_up() const {
  return is_proven_ ? Verdict::Next::kRetire : Verdict::Next::kEndRun;
}

}  // namespace torchbeast
