// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/door.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/readable.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/server/call_server.h"
#include "libtorchbeast/stream/vector_wire.h"
#include "libtorchbeast/support/finally.h"

namespace torchbeast {
namespace {

constexpr std::size_t kMaxNameBytes = 64;   // of a host
constexpr std::size_t kMaxWhyBytes = 1000;  // of a reason that a host is told
// Of a host's first message, of each of its texts, and of all that wait to be taken. Python reads
// the texts with the GIL; this is far more than spaces and options take.
constexpr std::size_t kMaxJoinBytes = 8 << 20;
constexpr std::size_t kMaxTextBytes = 1 << 20;
constexpr std::size_t kMaxWaitingBytes = 64 << 20;
// How long hosts have to answer the last action, and the last words to them may take.
constexpr std::chrono::milliseconds kLastAnswer{5000};
constexpr std::chrono::milliseconds kStopGrace = kLastAnswer + std::chrono::milliseconds(500);

// The answer to a learner that takes this one for an environment server.
grpc::Status no_server(Call*) {
  return {
      grpc::StatusCode::FAILED_PRECONDITION,
      "this is a learner that hosts dial in to: they reach it with polybeast_env --learner, and "
      "status with --learner"};
}

grpc::Status invalid(const std::string& what) { return {grpc::StatusCode::INVALID_ARGUMENT, what}; }

std::string checked_name(const std::string& name) {
  const bool is_one_line = readable(name) == name && name.find_first_of("\n\t") == name.npos;
  if (is_one_line && !name.empty() && name.size() <= kMaxNameBytes) return name;
  throw std::invalid_argument("a host's name must have 1 to " + std::to_string(kMaxNameBytes) +
                              " bytes of text in one line");
}

// The learner's end of a stream that a host has opened.
class JoinedWire final : public Wire {
 public:
  explicit JoinedWire(Call* call) : call_(call) {}

  bool start(std::uint64_t seed) override {
    action_.set_seed(seed);
    return send();
  }

  bool write(const ArrayNest& action) override {
    codec::encode(without_leading(action, 1), action_.mutable_nest_action());
    return send();
  }

  void give_options(const std::string& json) override { action_.set_env_options(json); }

  std::optional<RawStep> read() override {
    if (!call_->read(&message_)) return std::nullopt;
    if (message_.has_step()) return raw_step(message_.step());
    failure_ = message_.failure();
    if (failure_.empty()) throw std::invalid_argument(kNotAMessage);
    return std::nullopt;
  }

  void half_close() override {}  // the call's status tells the host
  grpc::Status finish() override {
    if (is_cancelled_) return grpc::Status::CANCELLED;
    if (environment_failed()) return {grpc::StatusCode::INTERNAL, failure_};
    return {grpc::StatusCode::UNAVAILABLE, "it has left"};
  }
  bool environment_failed() const override { return !failure_.empty(); }
  void cancel() override {
    is_cancelled_ = true;
    call_->interrupt();
  }

 private:
  bool send() {
    const bool is_sent = call_->write(action_);
    action_.Clear();
    return is_sent;
  }

  Call* const call_;
  std::atomic<bool> is_cancelled_ = false;
  std::string failure_;
  rpcenv::VectorAction action_;  // messages are used again, and with them their memory
  rpcenv::HostMessage message_;
};

}  // namespace

Door::Door(const Endpoint& endpoint, DoorOptions options) : claim_(endpoint), options_(options) {
  const std::int64_t streams = options.max_streams;
  calls_ = std::make_unique<CallServer>(
      endpoint,
      Methods{
          {"/rpcenv.RPCLearner/Join", {"Join", streams, [this](Call* call) { return join(call); }}},
          {"/rpcenv.RPCServerStatus/GetStatus",
           {"GetStatus", kOtherCalls, [this](Call* call) { return get_status(call); }}},
          {"/rpcenv.RPCEnvServer/Describe", {"Describe", kOtherCalls, no_server}}});
}

Door::~Door() { close(false); }

grpc::Status Door::join(Call* call) {
  std::int64_t id = 0;
  const grpc::Status refusal = hear(call, &id);
  return refusal.ok() ? attend(call, id) : refusal;
}

// Waits for a description. The message does not outlive this.
grpc::Status Door::hear(Call* call, std::int64_t* id) {
  const bool are_too_many = ++undescribed_ > options_.max_undescribed;
  const Finally described([this] { --undescribed_; });
  if (are_too_many) {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED,
            "too many streams have not described themselves yet"};
  }
  rpcenv::HostMessage first;
  if (!call->read(&first, kMaxJoinBytes)) {
    return invalid("expected a description of at most 8 MiB, got no message");
  }
  if (!first.has_joining()) return invalid("expected a description in the first message");
  try {
    return enter(first.joining(), id);
  } catch (const std::invalid_argument& error) {
    return invalid(error.what());
  }
}

grpc::Status Door::enter(const rpcenv::Joining& joining, std::int64_t* id) {
  EnvDescription description = codec::decode(joining.description(), kMaxTextBytes);
  std::string host = checked_name(joining.host());
  const std::size_t bytes = joining.ByteSizeLong();
  std::size_t waiting = bytes;
  MutexLock lock(mutex_);
  for (const auto& [_, visit] : visits_) waiting += visit.play ? 0 : visit.bytes;
  if (waiting > kMaxWaitingBytes) {
    return {grpc::StatusCode::RESOURCE_EXHAUSTED, "the descriptions of too many streams wait"};
  }
  *id = next_id_++;
  visits_.emplace(*id,
                  Visit{.stream = {*id, std::move(host), std::move(description)}, .bytes = bytes});
  changed_.notify_all();
  return grpc::Status::OK;
}

// Waits until the learner takes a stream, and plays it.
grpc::Status Door::attend(Call* call, std::int64_t id) {
  const Finally leaving([&] {
    decltype(visits_)::node_type visit;  // destroyed without the lock: a Play may own a pool, whose
    MutexLock lock(mutex_);              // end may wait for a thread that waits for the lock
    visit = visits_.extract(id);
  });
  std::optional<Play> play;
  grpc::Status refusal{grpc::StatusCode::CANCELLED, "the host has left"};
  while (!play && call->is_silent(kPollInterval)) {
    MutexLock lock(mutex_);
    const Visit& visit = visits_.at(id);
    if (is_closed_) {
      refusal = farewell();
      break;
    }
    if (!visit.refusal.empty()) {
      refusal = {grpc::StatusCode::FAILED_PRECONDITION, visit.refusal.substr(0, kMaxWhyBytes)};
      break;
    }
    play = visit.play;
  }
  return play ? this->play(call, id, *play) : refusal;
}

grpc::Status Door::play(Call* call, std::int64_t id, const Play& play) {
  const WaitingStream visitor = [&] {
    MutexLock lock(mutex_);
    return visits_.at(id).stream;
  }();
  std::string why;
  {
    EnvStream stream(visitor.host, options_.step_timeout, visitor.description,
                     std::make_unique<JoinedWire>(call));
    why = play(&stream);
  }
  call->resume();
  if (why.empty()) return wait_for_close(call);
  MutexLock lock(mutex_);
  ended_.push_back({visitor.host, why});
  return {grpc::StatusCode::ABORTED, why.substr(0, kMaxWhyBytes)};
}

// Keeps the host until it can be told whether the run has ended. Waits for its answer to the last
// action, for a moment: a host that is sending while the connection ends does not hear the status.
grpc::Status Door::wait_for_close(Call* call) {
  rpcenv::HostMessage answer;
  bool is_expected = call->is_reading();
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (is_closed_ && (!is_expected || Clock::now() >= last_answer_)) return farewell();
    }
    if (call->is_silent(kPollInterval)) continue;
    if (!call->read(&answer)) return grpc::Status::CANCELLED;
    is_expected = false;
  }
}

grpc::Status Door::farewell() const {
  if (run_has_ended_) return grpc::Status::OK;
  return {grpc::StatusCode::UNAVAILABLE, "the learner has stopped"};
}

std::optional<WaitingStream> Door::next(std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  MutexLock lock(mutex_);
  while (!is_closed_) {
    const auto found = std::find_if(visits_.begin(), visits_.end(),
                                    [](const auto& visit) { return !visit.second.was_offered; });
    if (found != visits_.end()) {
      found->second.was_offered = true;
      return found->second.stream;
    }
    if (Clock::now() >= deadline) break;
    changed_.wait_until(mutex_, deadline);
  }
  return std::nullopt;
}

bool Door::waits(std::int64_t id) const {
  MutexLock lock(mutex_);
  return visits_.contains(id) && !visits_.at(id).play;
}

void Door::take(std::int64_t id, Play play) {
  MutexLock lock(mutex_);
  const auto found = visits_.find(id);
  if (found == visits_.end()) return;
  found->second.play = std::move(play);
  found->second.taken_at = Clock::now();
}

void Door::refuse(std::int64_t id, const std::string& reason) {
  MutexLock lock(mutex_);
  const auto found = visits_.find(id);
  if (found != visits_.end()) found->second.refusal = reason;
}

std::vector<EndedStream> Door::ended() {
  MutexLock lock(mutex_);
  return std::exchange(ended_, {});
}

std::vector<JoinedHost> Door::hosts() const {
  std::map<std::string, JoinedHost> hosts;
  const auto now = Clock::now();
  MutexLock lock(mutex_);
  for (const auto& [id, visit] : visits_) {
    if (!visit.play) continue;
    JoinedHost& host = hosts[visit.stream.host];
    host.name = visit.stream.host;
    ++host.streams;
    host.envs += visit.stream.description.num_envs;
    host.joined = std::max(host.joined, now - visit.taken_at);
  }
  std::vector<JoinedHost> found;
  for (auto& [name, host] : hosts) found.push_back(std::move(host));
  return found;
}

grpc::Status Door::get_status(Call* call) {
  rpcenv::StatusRequest request;
  rpcenv::ServerStatus message;
  if (!call->read(&request)) return grpc::Status::CANCELLED;
  message.set_uptime_s(in_seconds(Clock::now() - since_));
  for (const JoinedHost& host : hosts()) {
    message.set_open_streams(message.open_streams() + host.streams);
    rpcenv::HostStatus* status = message.add_hosts();
    status->set_name(host.name);
    status->set_streams(host.streams);
    status->set_envs(host.envs);
    status->set_joined_s(in_seconds(host.joined));
  }
  call->write(message);
  return grpc::Status::OK;
}

void Door::begin_close(bool run_has_ended) {
  MutexLock lock(mutex_);
  if (is_closed_) return;
  is_closed_ = true;
  last_answer_ = Clock::now() + kLastAnswer;
  run_has_ended_ = run_has_ended;
  changed_.notify_all();
}

void Door::close(bool run_has_ended) {
  begin_close(run_has_ended);
  MutexLock lock(stopping_);
  calls_->stop(kStopGrace);
}

}  // namespace torchbeast
