// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/call_server.h"

#include <grpc/support/time.h>

#include <exception>
#include <system_error>
#include <utility>

namespace torchbeast {
namespace {

// While calls are open, the acceptor alternates between a pause and a wait of these lengths.
constexpr std::chrono::milliseconds kAcceptorPause{50};
constexpr std::chrono::milliseconds kAcceptorTurn{2};
// The acceptor does not pause for this long after a new call, because clients often make several.
constexpr std::chrono::milliseconds kAttention{100};
// The longest time that the acceptor waits until a client has received a refusal.
constexpr std::chrono::milliseconds kRefusalPatience{100};
constexpr std::chrono::milliseconds kForever{std::chrono::hours(24 * 365)};

// Returns a deadline that a change of the system's clock does not move.
gpr_timespec after(std::chrono::milliseconds time) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_millis(time.count(), GPR_TIMESPAN));
}

grpc::Status too_many_calls() {
  return {grpc::StatusCode::RESOURCE_EXHAUSTED, "the server has too many open calls"};
}

}  // namespace

bool Call::is_done() {
  void* tag;
  bool ok = false;
  return events_.Next(&tag, &ok) && ok;
}

void Call::finish(const grpc::Status& status, std::chrono::milliseconds patience) {
  stream_.Finish(status, this);
  events_.Shutdown();
  void* tag;
  bool ok;
  for (;;) {
    switch (events_.AsyncNext(&tag, &ok, after(patience))) {
      case grpc::CompletionQueue::SHUTDOWN:
        return;
      case grpc::CompletionQueue::TIMEOUT:
        context_.TryCancel();
        break;
      case grpc::CompletionQueue::GOT_EVENT:
        break;
    }
  }
}

CallServer::CallServer(const Endpoint& endpoint, std::int64_t max_calls, Handler handler)
    : max_calls_(max_calls), handler_(std::move(handler)) {
  grpc::ServerBuilder builder;
  builder.RegisterAsyncGenericService(&calls_);
  arrivals_ = builder.AddCompletionQueue();
  server_ = start_server(endpoint, &builder);
  acceptor_ = std::thread([this] { accept(); });
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
  acceptor_.join();
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
        return;
      case grpc::CompletionQueue::TIMEOUT:
        break;
      case grpc::CompletionQueue::GOT_EVENT:
        if (ok) start(std::move(next_));  // otherwise the server is shutting down
        attentive_until = Clock::now() + kAttention;
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
  grpc::Status refusal = admit();
  if (refusal.ok()) {
    try {
      std::thread([this, call = call.get()] { serve(std::unique_ptr<Call>(call)); }).detach();
      call.release();
      return;
    } catch (const std::system_error&) {  // the system has no more threads
      count_closed();
      refusal = too_many_calls();
    }
  }
  call->finish(refusal, kRefusalPatience);
}

// Requests the next call after one has arrived. Counts the new call as open, or returns the reason
// to refuse it.
grpc::Status CallServer::admit() {
  MutexLock lock(mutex_);
  // gRPC permits no further request.
  if (stopping_) return {grpc::StatusCode::UNAVAILABLE, "the server is stopping"};
  request_call();
  if (open_ >= max_calls_) return too_many_calls();
  ++open_;
  return grpc::Status::OK;
}

void CallServer::serve(std::unique_ptr<Call> call) {
  grpc::Status status;
  try {
    status = handler_(call.get());
  } catch (const std::exception& error) {  // no memory
    status = {grpc::StatusCode::UNKNOWN, error.what()};
  }
  call->finish(status, kForever);
  call.reset();
  count_closed();
}

void CallServer::count_closed() {
  MutexLock lock(mutex_);
  --open_;
  changed_.notify_all();  // with the lock: stop() may return, and this object end, once it is free
}

}  // namespace torchbeast
