// SPDX-License-Identifier: Apache-2.0
// A deadline for a call, by a monotonic clock.

#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <chrono>
#include <thread>

#include "libtorchbeast/support/sync.h"
#include "libtorchbeast/support/thread.h"

namespace torchbeast {

// Cancels a call that takes longer than `limit`. gRPC's own deadlines may never pass, because they
// are timers; see connected_channel().
//
//   TimeLimit limit(&context, timeout);
//   const grpc::Status status = limit.status(stub.Call(&context, ...));
//
// Thread safety: one thread. A second thread, which lives as long as the limit, cancels the call.
// Closing: the destructor returns immediately and does not cancel anything. The context must
// outlive the limit.
class TimeLimit {
 public:
  TimeLimit(grpc::ClientContext* call, std::chrono::milliseconds limit)
      : thread_(started_thread(
            [this, call, until = Clock::now() + limit] { cancel_at(until, call); })) {}
  ~TimeLimit() {
    {
      MutexLock lock(mutex_);
      closed_ = true;
    }
    was_closed_.notify_one();
    thread_.join();
  }
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;

  // Returns the status of the call that has ended: DEADLINE_EXCEEDED if the limit ended it.
  grpc::Status status(const grpc::Status& ended) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (!exceeded_ || ended.error_code() != grpc::StatusCode::CANCELLED) return ended;
    return {grpc::StatusCode::DEADLINE_EXCEEDED, "Deadline Exceeded"};
  }

 private:
  void cancel_at(Clock::time_point until, grpc::ClientContext* call) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (!closed_ && Clock::now() < until) was_closed_.wait_until(mutex_, until);
    if (closed_) return;
    exceeded_ = true;
    call->TryCancel();
  }

  Mutex mutex_;
  CondVar was_closed_;
  bool closed_ GUARDED_BY(mutex_) = false;
  bool exceeded_ GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last, so that the other members exist when it starts
};

}  // namespace torchbeast
