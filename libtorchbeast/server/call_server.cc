// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/call_server.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <utility>

#include "health.pb.h"
#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/support/thread.h"

namespace torchbeast {
namespace {

// While calls are open, the acceptor alternates between a pause and a wait of these lengths.
constexpr std::chrono::milliseconds kAcceptorPause{50};
constexpr std::chrono::milliseconds kAcceptorTurn{2};
// The acceptor does not pause for this long after a new call, because clients often make several.
constexpr std::chrono::milliseconds kAttention{100};
// A refused call is cancelled if its refusal cannot be sent within this time.
constexpr std::chrono::milliseconds kRefusalPatience{100};
// How many refused calls the acceptor looks at in a turn with a new call, and in one without. A
// look takes up to 0.2 ms while a client does not read.
constexpr std::size_t kLooksWhenBusy = 2;
constexpr std::size_t kLooksWhenIdle = 64;
// How long a client may take to send the first message of a call.
constexpr std::chrono::seconds kFirstMessage{10};
constexpr char kHealthCheck[] = "/grpc.health.v1.Health/Check";

// Returns a deadline that a change of the system's clock does not move.
gpr_timespec after(std::chrono::milliseconds time) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_millis(time.count(), GPR_TIMESPAN));
}

grpc::Status too_many_calls() {
  return {grpc::StatusCode::RESOURCE_EXHAUSTED, "the server has too many open calls"};
}

}  // namespace

void Call::cancel_after(std::chrono::milliseconds time) { deadline_ = after(time); }
void Call::cancel_never() { deadline_ = gpr_inf_future(GPR_CLOCK_MONOTONIC); }

Call::Event Call::next(gpr_timespec until) {
  void* tag;
  bool ok;
  switch (events_.AsyncNext(&tag, &ok, gpr_time_min(until, deadline_))) {
    case grpc::CompletionQueue::SHUTDOWN:
      return Event::kEnd;
    case grpc::CompletionQueue::GOT_EVENT:
      *static_cast<Operation*>(tag) = {.is_open = false, .succeeded = ok};
      return Event::kOperation;
    case grpc::CompletionQueue::TIMEOUT:
      break;
  }
  if (gpr_time_cmp(gpr_now(GPR_CLOCK_MONOTONIC), deadline_) >= 0) cancel();
  return Event::kTimeout;
}

void Call::begin_read() {
  if (reading_.is_open || reading_.succeeded) return;
  reading_.is_open = true;
  stream_.Read(&received_, &reading_);
}

bool Call::is_silent(std::chrono::milliseconds time) {
  begin_read();
  const gpr_timespec until = after(time);
  while (reading_.is_open && gpr_time_cmp(gpr_now(GPR_CLOCK_MONOTONIC), until) < 0) next(until);
  return reading_.is_open;
}

bool Call::is_done(const Operation& operation) {
  while (operation.is_open && !is_interrupted_) {
    if (next(gpr_inf_future(GPR_CLOCK_MONOTONIC)) == Event::kEnd) return false;
  }
  return !operation.is_open && operation.succeeded;
}

void Call::interrupt() {
  if (is_interrupted_.exchange(true)) return;
  // At once: a timer would stand still after the system clock was set back.
  alarm_.Set(&events_, gpr_inf_past(GPR_CLOCK_MONOTONIC), &waking_up_);
}

void Call::begin_end(const grpc::Status& status) {
  if (writing_.is_open) cancel();  // interrupted: its message is in the way of a status
  stream_.Finish(status, &ending_);
  events_.Shutdown();
}

void Call::wait_for_end() {
  while (next(gpr_inf_future(GPR_CLOCK_MONOTONIC)) != Event::kEnd) continue;
}

bool Call::has_ended() {
  for (;;) {
    const Event event = next(gpr_inf_past(GPR_CLOCK_MONOTONIC));
    if (event != Event::kOperation) return event == Event::kEnd;
  }
}

void Call::cancel() {
  context_.TryCancel();
  cancel_never();
}

CallServer::CallServer(const Endpoint& endpoint, Methods methods)
    : credentials_(endpoint.credentials), methods_(std::move(methods)) {
  choose_polling();  // gRPC starts with the first object below
  std::int64_t most = kOtherCalls;
  for (const auto& [path, method] : methods_) most = std::max(most, method.max_calls);
  methods_.emplace(kHealthCheck, Method{kHealthCheck, kOtherCalls,
                                        [this](Call* call) { return check_health(call); }});
  grpc::ServerBuilder builder;
  builder.RegisterAsyncGenericService(&calls_);
  arrivals_ = builder.AddCompletionQueue();
  // A client that opens many calls and reads nothing keeps gRPC from ending any of them.
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, static_cast<int>(most + kOtherCalls));
  server_ = start_server(endpoint, &builder);
  try {
    acceptor_ = started_thread([this] { accept(); });
  } catch (const std::exception& error) {
    stop(std::chrono::milliseconds(0));
    throw ConnectionError("cannot serve at " + endpoint.address + ": " + error.what());
  }
}

void CallServer::stop(std::chrono::milliseconds grace) {
  if (server_ == nullptr) return;
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  server_->Shutdown(std::chrono::system_clock::now() + grace);
  {
    MutexLock lock(mutex_);
    while (open_ > 0) changed_.wait(mutex_);
  }
  arrivals_->Shutdown();
  if (acceptor_.joinable()) acceptor_.join();
  server_.reset();
}

// Runs in the acceptor, until stop().
void CallServer::accept() {
  {
    MutexLock lock(mutex_);
    if (!stopping_) request_call();
  }
  Clock::time_point attentive_until = {};
  for (;;) {
    const bool is_seldom = Clock::now() >= attentive_until && pause();
    void* tag;
    bool ok;
    switch (arrivals_->AsyncNext(&tag, &ok, after(is_seldom ? kAcceptorTurn : kPollInterval))) {
      case grpc::CompletionQueue::SHUTDOWN:
        for (const auto& call : refused_) call->wait_for_end();
        refused_.clear();
        return;
      case grpc::CompletionQueue::TIMEOUT:
        release_refused(kLooksWhenIdle);
        break;
      case grpc::CompletionQueue::GOT_EVENT:
        if (ok) start(std::move(next_));  // otherwise the server is shutting down
        attentive_until = Clock::now() + kAttention;
        release_refused(kLooksWhenBusy);
    }
  }
}

// Waits for the acceptor's next turn. Returns false, at once, if it need not wait.
bool CallServer::pause() {
  MutexLock lock(mutex_);
  if (stopping_ || open_ == 0) return false;
  changed_.wait_until(mutex_, Clock::now() + kAcceptorPause);
  return true;
}

void CallServer::request_call() {
  next_ = std::make_unique<Call>();
  calls_.RequestCall(&next_->context_, &next_->stream_, &next_->events_, arrivals_.get(), this);
}

void CallServer::start(std::unique_ptr<Call> call) {
  grpc::Status refusal = admit(call.get());
  if (refusal.ok()) {
    try {
      std::thread([this, call = call.get()] { serve(std::unique_ptr<Call>(call)); }).detach();
      call.release();
      return;
    } catch (const std::exception&) {  // the system has no more threads, or no memory
      count_closed(*call->place_);
      refusal = too_many_calls();
    }
  }
  call->cancel_after(kRefusalPatience);
  call->begin_end(refusal);
  refused_.push_back(std::move(call));
}

// Drops refused calls that have ended, of the next `looks`. It never waits: a client that does not
// read can keep gRPC from ending a call, even one that is cancelled.
void CallServer::release_refused(std::size_t looks) {
  for (looks = std::min(looks, refused_.size()); looks > 0; --looks) {
    std::unique_ptr<Call> call = std::move(refused_.front());
    refused_.pop_front();
    if (!call->has_ended()) refused_.push_back(std::move(call));
  }
}

// Requests the next call after one has arrived. Counts the new call as open, or returns the reason
// to refuse it.
grpc::Status CallServer::admit(Call* call) {
  const auto found = methods_.find(call->method());
  const grpc::Status stranger = check_token(credentials_, call->context_.client_metadata());
  MutexLock lock(mutex_);
  // gRPC permits no further request.
  if (stopping_) return {grpc::StatusCode::UNAVAILABLE, "the server is stopping"};
  request_call();
  if (!stranger.ok()) return stranger;
  if (found == methods_.end()) return {grpc::StatusCode::UNIMPLEMENTED, "no such method"};
  const Method& method = found->second;
  if (open_in_[method.group] >= method.max_calls) return too_many_calls();
  call->place_ = &method.group;
  ++open_in_[method.group];
  ++open_;
  return grpc::Status::OK;
}

// In place of gRPC's own service, whose calls need no token and have no limit: an open Watch costs
// the server 18 KiB.
grpc::Status CallServer::check_health(Call* call) const {
  grpc::health::v1::HealthCheckRequest request;
  grpc::health::v1::HealthCheckResponse response;
  if (!call->read(&request)) return grpc::Status::CANCELLED;
  const std::string service = "/" + request.service() + "/";
  const auto of_service = methods_.lower_bound(service);
  if (request.service() != "" &&
      (of_service == methods_.end() || !of_service->first.starts_with(service))) {
    return {grpc::StatusCode::NOT_FOUND, "no such service"};
  }
  response.set_status(grpc::health::v1::HealthCheckResponse::SERVING);
  call->write(response);
  return grpc::Status::OK;
}

void CallServer::serve(std::unique_ptr<Call> call) {
  grpc::Status status;
  call->cancel_after(kFirstMessage);
  try {
    status = methods_.at(call->method()).handler(call.get());
  } catch (const std::exception& error) {  // no memory
    status = {grpc::StatusCode::UNKNOWN, error.what()};
  }
  call->begin_end(status);
  call->wait_for_end();
  const std::string* place = call->place_;
  call.reset();
  count_closed(*place);
}

void CallServer::count_closed(const std::string& group) {
  MutexLock lock(mutex_);
  --open_in_[group];
  --open_;
  changed_.notify_all();  // with the lock: stop() may return, and this object end, once it is free
}

}  // namespace torchbeast
