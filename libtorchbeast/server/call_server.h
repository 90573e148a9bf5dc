// SPDX-License-Identifier: Apache-2.0
// Serves calls of any method. Each call has its own thread, which waits for the socket of the call.

#pragma once

#include <grpc/support/time.h>
#include <grpcpp/alarm.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// One call at the server's end: messages come in, messages go out.
//
// Thread safety: one thread; interrupt() from any thread.
class Call {
 public:
  // Path of the method that the client calls: "/package.Service/Method".
  const std::string& method() const { return context_.method(); }
  grpc::ServerContext* context() { return &context_; }

  // Reads the client's next message. Returns false if there are no more messages, or if the message
  // is larger than max_bytes or cannot be parsed. If the client speaks first, it has ten seconds.
  template <typename Message>
  bool read(Message* message, std::size_t max_bytes = codec::kMaxMessageBytes) {
    begin_read();
    if (!is_done(reading_)) return false;
    reading_.succeeded = false;  // taken
    cancel_never();
    if (received_.Length() > max_bytes) return false;
    return grpc::SerializationTraits<Message>::Deserialize(&received_, message).ok();
  }

  // Waits up to `time` for the client's next message. Returns true if the client has neither sent
  // one nor ended the call; otherwise read() returns what has come.
  bool is_silent(std::chrono::milliseconds time);

  // Whether a read has begun and was interrupted, so that the message is still to come.
  bool is_reading() const { return reading_.is_open; }

  // Sends a message. Returns false once the call is over.
  template <typename Message>
  bool write(const Message& message) {
    grpc::ByteBuffer bytes;
    bool is_own = false;
    const auto status = grpc::SerializationTraits<Message>::Serialize(message, &bytes, &is_own);
    if (!status.ok()) return false;
    cancel_never();
    writing_.is_open = true;
    stream_.Write(bytes, &writing_);
    return is_done(writing_);
  }

  // Ends the wait in read() or write(), and all later waits until resume(). The call stays open.
  // May be called again, but not after resume().
  void interrupt();
  void resume() { is_interrupted_ = false; }

 private:
  friend class CallServer;

  // An operation that gRPC has been asked to do. Its address is gRPC's tag.
  struct Operation {
    bool is_open = false;
    bool succeeded = false;
  };
  enum class Event { kOperation, kTimeout, kEnd };

  // Cancels the call if it waits for the client longer than this, counted from now.
  void cancel_after(std::chrono::milliseconds time);
  void cancel_never();
  // Waits for an operation to complete, until the call's deadline and `until`. Once the call has
  // ended, no operation completes.
  Event next(gpr_timespec until);
  void begin_read();
  // Waits for the operation. Returns whether it succeeded.
  bool is_done(const Operation& operation);
  // Begins to send the status that ends the call.
  void begin_end(const grpc::Status& status);
  // Waits until gRPC has finished the call.
  void wait_for_end();
  // Returns whether gRPC has finished the call, without waiting.
  bool has_ended();
  void cancel();

  grpc::CompletionQueue events_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  grpc::ByteBuffer received_;
  Operation reading_, writing_, ending_, waking_up_;
  grpc::Alarm alarm_;  // wakes this call's thread
  std::atomic<bool> is_interrupted_ = false;
  gpr_timespec deadline_ = gpr_inf_future(GPR_CLOCK_MONOTONIC);  // when the call is cancelled
  const std::string* place_ = nullptr;  // the group that the call counts towards
};

// How a method is served.
struct Method {
  // The maximum number of open calls in a group. The limits of two groups are independent.
  std::string group;
  std::int64_t max_calls;
  // Handles a call and returns the status that ends it; an exception ends the call with UNKNOWN.
  std::function<grpc::Status(Call*)> handler;
};

// The methods by path.
using Methods = std::map<std::string, Method>;

// The maximum number of open calls of a method that is not a stream.
inline constexpr std::int64_t kOtherCalls = 32;

// Serves calls at an endpoint, and gRPC's health checks of its services.
//
//   connections -> acceptor: new connections and new calls; refuses those without the token
//               -> a thread for each call: its handler, which reads and writes the call's messages
//
// gRPC receives data in the threads that wait for it. With poll(), a call's thread waits for the
// connection of its call, and the acceptor waits for all connections. If the acceptor receives a
// call's message, it has to wake the call's thread, which doubles the number of thread switches in
// a step. Therefore, while calls are open, the acceptor pauses for 50 ms between short waits. New
// connections, new calls, and pings that arrive while a handler is busy may take up to 50 ms
// longer.
//
// Thread safety: one thread makes, stops and destroys it. Handlers run in many threads at once.
// Closing: stop() and the destructor end all calls and wait for their handlers.
class CallServer {
 public:
  // Serves from now on. Calls without the endpoint's token end with UNAUTHENTICATED before anything
  // is read of their messages, and calls beyond a limit with RESOURCE_EXHAUSTED. Throws
  // ConnectionError like start_server(), or if no thread can be started.
  CallServer(const Endpoint& endpoint, Methods methods);
  ~CallServer() { stop(std::chrono::milliseconds(0)); }
  CallServer(const CallServer&) = delete;
  CallServer& operator=(const CallServer&) = delete;

  // Refuses new calls, cancels calls that are still open after `grace`, and waits for all handlers.
  // A second call does nothing.
  void stop(std::chrono::milliseconds grace) EXCLUDES(mutex_);

 private:
  void accept() EXCLUDES(mutex_);
  bool pause() EXCLUDES(mutex_);
  void request_call() REQUIRES(mutex_);
  void start(std::unique_ptr<Call> call) EXCLUDES(mutex_);
  grpc::Status admit(Call* call) EXCLUDES(mutex_);
  grpc::Status check_health(Call* call) const;
  void release_refused(std::size_t looks);
  void serve(std::unique_ptr<Call> call) EXCLUDES(mutex_);
  void count_closed(const std::string& group) EXCLUDES(mutex_);

  const Credentials credentials_;
  Methods methods_;
  grpc::AsyncGenericService calls_;
  std::unique_ptr<grpc::ServerCompletionQueue> arrivals_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Call> next_;                 // used by the acceptor: becomes the next call
  std::deque<std::unique_ptr<Call>> refused_;  // used by the acceptor: being refused
  Mutex mutex_;
  CondVar changed_;
  std::int64_t open_ GUARDED_BY(mutex_) = 0;                        // calls with a thread
  std::map<std::string, std::int64_t> open_in_ GUARDED_BY(mutex_);  // the same, by group
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread acceptor_;
};

}  // namespace torchbeast
