// SPDX-License-Identifier: Apache-2.0
// Knows the streams of a pool: which of them are away or retired, and whether enough are left.

#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "libtorchbeast/acting/shortage.h"
#include "libtorchbeast/acting/stream_history.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// Numbers of a pool's streams.
struct StreamCounts {
  std::int64_t live = 0;       // connected, and have sent their first step
  std::int64_t lost = 0;       // losses so far
  std::int64_t restarted = 0;  // failures of environments so far that retired no stream
  std::int64_t retired = 0;    // not tried again
};

// A stream that is lost and has not reconnected yet.
struct AwayStream {
  std::string address;
  Clock::duration away;  // since it was lost
  std::string why;       // the error that ended its last connection; empty if nobody answers
};

// The streams of a pool, and how each is doing.
//
//   add() -> came_up() -> went_down() -> connects_again() -> came_up() ...
//                                     -> retire()   it remains a member, but is not tried again
//                                     -> remove()   a host's stream: if it comes back, as another
//
// A connection may also end before it has come up; then there is no went_down(). Once the pool
// stops, no call has to follow.
//
// A run needs min_streams streams. It has a shortage while fewer are present, that is, neither away
// nor retired. A stream that connects for the first time counts as present.
//
// Thread safety: any thread may call any method; the thread of a stream makes its calls, in this
// order. The roster has one lock, and a method that holds it neither waits nor calls anything that
// takes another lock.
class StreamRoster {
 public:
  // min_streams: 0 is half of the members, but at least one.
  StreamRoster(std::int64_t min_streams, RetryOptions retries);

  // Adds a stream. Returns its number, which no other stream has ever had.
  std::int64_t add(std::string address) EXCLUDES(mutex_);

  // Records that a stream's connection has brought its first step: it is live, and not away.
  void came_up(std::int64_t number) EXCLUDES(mutex_);
  // Records that a connection that had come up has ended.
  void went_down() EXCLUDES(mutex_);
  // Counts a loss, whatever follows it.
  void count_loss() EXCLUDES(mutex_);

  // Records that a stream connects again after this error. is_away: whether it counts as away until
  // it has come up. failures: of its environments within the window, which are reported; 0 if only
  // the connection was lost.
  void connects_again(std::int64_t number, const std::exception& error, bool is_away, int failures)
      EXCLUDES(mutex_);
  // Retires a stream for good after this error. Returns the message with which the run must end if
  // too few streams are left, and otherwise reports the retirement.
  std::optional<std::string> retire(std::int64_t number, const std::string& error, int failures)
      EXCLUDES(mutex_);

  // What ended the stream of a host: its connection was lost, or its environments failed.
  enum class End { kLost, kFailed };
  // Forgets the stream of a host, and counts its end. Returns the error's message.
  std::string remove(std::int64_t number, End end, const std::exception& error) EXCLUDES(mutex_);

  // Returns the messages for the user since the last call.
  std::vector<std::string> take_reports() EXCLUDES(mutex_);
  // Returns the shortage, if there is one.
  std::optional<TooFewStreams> shortage() EXCLUDES(mutex_);
  // Throws ConnectionError once a shortage has lasted for reconnect_timeout.
  void check_enough() EXCLUDES(mutex_);

  // Returns the numbers of streams at present.
  StreamCounts counts() const EXCLUDES(mutex_);
  // Returns the streams that are lost at present.
  std::vector<AwayStream> away_streams() const EXCLUDES(mutex_);

 private:
  struct Member {
    std::string address;
    std::optional<Clock::time_point> away_since = {};
    std::string why_away = {};  // see AwayStream::why
    bool is_retired = false;
  };

  // The number of streams; of those that are not retired; and of those that are neither retired nor
  // away.
  struct Strength {
    std::int64_t all = 0, unretired = 0, present = 0;
  };
  Strength strength() const REQUIRES(mutex_);
  std::int64_t needed(const Strength& strength) const;
  std::optional<TooFewStreams> note_shortage() REQUIRES(mutex_);

  const std::int64_t min_streams_;
  const RetryOptions retries_;
  mutable Mutex mutex_;
  std::map<std::int64_t, Member> members_ GUARDED_BY(mutex_);  // by number
  std::int64_t next_number_ GUARDED_BY(mutex_) = 0;
  StreamCounts counts_ GUARDED_BY(mutex_);  // without retired
  ShortageWatch shortage_watch_ GUARDED_BY(mutex_);
  std::vector<std::string> reports_ GUARDED_BY(mutex_);
  std::string last_end_ GUARDED_BY(mutex_);  // the error that ended the most recent connection
};

}  // namespace torchbeast
