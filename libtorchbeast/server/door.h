// SPDX-License-Identifier: Apache-2.0
// The learner's end of the streams of hosts that dial in: accepts streams, lets the learner take
// them, and plays them.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "libtorchbeast/proto/description.h"
#include "libtorchbeast/server/address_claim.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/stream/env_stream.h"
#include "libtorchbeast/support/sync.h"

namespace rpcenv {
class Joining;
}

namespace torchbeast {

class Call;
class CallServer;

struct DoorOptions {
  std::int64_t max_streams = kMaxStreams;
  std::int64_t max_undescribed = 64;  // streams that have not described themselves yet
  std::chrono::milliseconds step_timeout = std::chrono::minutes(10);  // of one step
};

// A stream that has described itself and waits for the learner.
struct WaitingStream {
  std::int64_t id;
  std::string host;
  EnvDescription description;
};

// A stream that has ended after it was taken.
struct EndedStream {
  std::string host;
  std::string why;
};

// A host whose streams are played.
struct JoinedHost {
  std::string name;
  std::int64_t streams = 0;
  std::int64_t envs = 0;        // in all of its streams
  Clock::duration joined = {};  // since its first stream was taken
};

// Listens for hosts, see RPCLearner in rpcenv.proto.
//
//   host -> Join -> described -> next() -> take() -> Play in the call's thread -> ended()
//                                       -> refuse()
//
// Whatever a host sends ends its own stream at most: here if it is no description, and in the Play
// later (see ActorPool::play_joined). What its description says is bounded, and so are the
// descriptions that wait.
//
// Thread safety: any thread may call any method.
// Closing: close() and the destructor wake next() and end all streams. A stream that is being
// played ends when its Play returns; close() waits for it.
class Door {
 public:
  // Plays a stream in the calling thread until it ends. Returns why it ended, or "" if the run
  // ends. Must not throw.
  using Play = std::function<std::string(EnvStream*)>;

  // Listens from now on. Throws ConnectionError like AddressClaim and start_server().
  Door(const Endpoint& endpoint, DoorOptions options);
  ~Door();
  Door(const Door&) = delete;
  Door& operator=(const Door&) = delete;

  // Returns the next waiting stream; returns each stream once. Returns nothing after `timeout`, and
  // once the door closes.
  std::optional<WaitingStream> next(std::chrono::milliseconds timeout) EXCLUDES(mutex_);
  // Whether a stream is still waiting.
  bool waits(std::int64_t id) const EXCLUDES(mutex_);
  // Lets a stream be played, or refuses it with the reason. Does nothing if the stream has left.
  void take(std::int64_t id, Play play) EXCLUDES(mutex_);
  void refuse(std::int64_t id, const std::string& reason) EXCLUDES(mutex_);
  // Returns the streams that have ended since the last call.
  std::vector<EndedStream> ended() EXCLUDES(mutex_);
  // The hosts whose streams are being played, by name.
  std::vector<JoinedHost> hosts() const EXCLUDES(mutex_);

  // Closes the door without waiting. Streams that come or wait are told whether the run has ended,
  // or whether the host may dial again. Only the first call counts.
  void begin_close(bool run_has_ended) EXCLUDES(mutex_);
  // Closes the door and waits for all streams.
  void close(bool run_has_ended) EXCLUDES(mutex_);

 private:
  // A stream that has described itself, for as long as its call lasts.
  struct Visit {
    const WaitingStream stream;
    const std::size_t bytes;   // of its description on the wire
    bool was_offered = false;  // by next()
    std::optional<Play> play = {};
    std::string refusal = {};
    Clock::time_point taken_at = {};
  };

  grpc::Status join(Call* call) EXCLUDES(mutex_);
  grpc::Status hear(Call* call, std::int64_t* id) EXCLUDES(mutex_);
  grpc::Status attend(Call* call, std::int64_t id) EXCLUDES(mutex_);
  grpc::Status play(Call* call, std::int64_t id, const Play& play) EXCLUDES(mutex_);
  grpc::Status wait_for_close(Call* call) EXCLUDES(mutex_);
  grpc::Status enter(const rpcenv::Joining& joining, std::int64_t* id) EXCLUDES(mutex_);
  grpc::Status farewell() const REQUIRES(mutex_);
  grpc::Status get_status(Call* call) EXCLUDES(mutex_);

  const AddressClaim claim_;
  const DoorOptions options_;
  const Clock::time_point since_ = Clock::now();
  std::atomic<std::int64_t> undescribed_ = 0;  // streams
  mutable Mutex mutex_;
  CondVar changed_;  // a stream waits, or the door closes
  std::int64_t next_id_ GUARDED_BY(mutex_) = 0;
  std::map<std::int64_t, Visit> visits_ GUARDED_BY(mutex_);  // by id
  std::vector<EndedStream> ended_ GUARDED_BY(mutex_);
  bool is_closed_ GUARDED_BY(mutex_) = false;
  bool run_has_ended_ GUARDED_BY(mutex_) = false;
  Clock::time_point last_answer_ GUARDED_BY(mutex_) = {};  // of a host, once closed
  Mutex stopping_;                     // held by close(), which several threads may call
  std::unique_ptr<CallServer> calls_;  // last: its threads use all others
};

}  // namespace torchbeast
