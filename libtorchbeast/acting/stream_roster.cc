// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/stream_roster.h"

#include <algorithm>
#include <utility>

#include "libtorchbeast/stream/stream_errors.h"
#include "libtorchbeast/support/errors.h"

namespace torchbeast {
namespace {

std::string within(std::chrono::milliseconds window, int failures) {
  return "failure " + std::to_string(failures) + " within " + to_string(window);
}

}  // namespace

StreamRoster::StreamRoster(std::int64_t min_streams, RetryOptions retries)
    : min_streams_(min_streams), retries_(retries), shortage_watch_(retries.reconnect_timeout) {}

std::int64_t StreamRoster::add(std::string address) {
  MutexLock lock(mutex_);
  members_.emplace(next_number_, Member{.address = std::move(address)});
  return next_number_++;
}

void StreamRoster::came_up(std::int64_t number) {
  MutexLock lock(mutex_);
  members_.at(number).away_since.reset();
  ++counts_.live;
}

void StreamRoster::went_down() {
  MutexLock lock(mutex_);
  --counts_.live;
}

void StreamRoster::count_loss() {
  MutexLock lock(mutex_);
  ++counts_.lost;
}

void StreamRoster::connects_again(std::int64_t number, const std::exception& error, bool is_away,
                                  int failures) {
  MutexLock lock(mutex_);
  Member& member = members_.at(number);
  const bool was_away = member.away_since.has_value();
  if (is_away && !was_away) member.away_since = Clock::now();
  member.why_away = said_by_server(error, member.address);
  if (!member.why_away.empty() || !was_away) last_end_ = error.what();  // else its loss says more
  if (failures == 0) return;
  ++counts_.restarted;
  reports_.push_back("stream " + std::to_string(number) + " gets new environments after " +
                     within(retries_.failure_window, failures) + ", and is retired after " +
                     std::to_string(retries_.failures) + ": " + error.what());
}

std::optional<std::string> StreamRoster::retire(std::int64_t number, const std::string& error,
                                                int failures) {
  MutexLock lock(mutex_);
  members_.at(number).is_retired = true;
  const Strength left = strength();
  std::string report = "stream " + std::to_string(number) + " is retired";
  if (failures > 0) report += " after " + within(retries_.failure_window, failures);
  report += ", " + std::to_string(left.unretired) + " of " + std::to_string(left.all) +
            " streams are left";
  if (left.unretired < needed(left)) {
    return report + ", and the run needs " + std::to_string(needed(left)) +
           " (min_streams): " + error;
  }
  reports_.push_back(report + ": " + error);
  return std::nullopt;
}

std::string StreamRoster::remove(std::int64_t number, End end, const std::exception& error) {
  MutexLock lock(mutex_);
  members_.erase(number);
  ++(end == End::kLost ? counts_.lost : counts_.restarted);
  return last_end_ = error.what();
}

std::vector<std::string> StreamRoster::take_reports() {
  MutexLock lock(mutex_);
  return std::exchange(reports_, {});
}

std::optional<TooFewStreams> StreamRoster::shortage() {
  MutexLock lock(mutex_);
  return note_shortage();
}

void StreamRoster::check_enough() {
  MutexLock lock(mutex_);
  const std::optional<TooFewStreams> shortage = note_shortage();
  if (!shortage || shortage->left > Clock::duration(0)) return;
  throw ConnectionError(
      std::to_string(shortage->connected) + " of " + std::to_string(strength().all) +
      " streams are connected, and the run needs " + std::to_string(shortage->needed) +
      " (min_streams)" + (last_end_.empty() ? "" : "; the last loss: ") + last_end_);
}

StreamCounts StreamRoster::counts() const {
  MutexLock lock(mutex_);
  const Strength now = strength();
  StreamCounts counts = counts_;
  counts.retired = now.all - now.unretired;
  return counts;
}

std::vector<AwayStream> StreamRoster::away_streams() const {
  std::vector<AwayStream> away;
  MutexLock lock(mutex_);
  const auto now = Clock::now();
  for (const auto& [number, member] : members_) {
    if (!member.away_since || member.is_retired) continue;
    away.push_back({member.address, now - *member.away_since, member.why_away});
  }
  return away;
}

StreamRoster::Strength StreamRoster::strength() const {
  Strength strength;
  for (const auto& [number, member] : members_) {
    ++strength.all;
    if (member.is_retired) continue;
    ++strength.unretired;
    if (!member.away_since) ++strength.present;
  }
  return strength;
}

std::int64_t StreamRoster::needed(const Strength& strength) const {
  if (min_streams_ > 0) return min_streams_;
  return std::max<std::int64_t>(1, (strength.all + 1) / 2);
}

std::optional<TooFewStreams> StreamRoster::note_shortage() {
  const Strength now = strength();
  return shortage_watch_.note(now.present, needed(now), Clock::now());
}

}  // namespace torchbeast
