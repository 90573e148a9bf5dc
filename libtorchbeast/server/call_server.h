// SPDX-License-Identifier: Apache-2.0
// Serves calls of any method, each in a thread of its own that waits for its own socket.

#pragma once

#include <grpc/support/time.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {

// One call at the server's end: messages come in, messages go out.
//
// Thread safety: one thread.
class Call {
 public:
  // Path of the method that the client calls: "/package.Service/Method".
  const std::string& method() const { return context_.method(); }
  grpc::ServerContext* context() { return &context_; }

  // Cancels the call if it waits for the client longer than this from now.
  void cancel_after(std::chrono::milliseconds time);

  // Reads the client's next message. Returns false if none follows or if it cannot be parsed.
  template <typename Message>
  bool read(Message* message) {
    grpc::ByteBuffer bytes;
    stream_.Read(&bytes, this);
    return is_done() && grpc::SerializationTraits<Message>::Deserialize(&bytes, message).ok();
  }

  // Sends a message. Returns false once the call is over.
  template <typename Message>
  bool write(const Message& message) {
    grpc::ByteBuffer bytes;
    bool is_own = false;
    const auto status = grpc::SerializationTraits<Message>::Serialize(message, &bytes, &is_own);
    if (!status.ok()) return false;
    stream_.Write(bytes, this);
    return is_done();
  }

 private:
  friend class CallServer;

  // Waits for the next event. Returns whether one came; none comes once the call has ended.
  bool next(bool* ok);
  // Waits for the operation that was started last. Returns whether it succeeded.
  bool is_done();
  // Begins to send the status, with which the call ends.
  void begin_end(const grpc::Status& status);
  // Waits until gRPC is through with the call.
  void wait_for_end();
  // Returns whether gRPC is through with the call, without a wait.
  bool has_ended();
  void cancel();

  grpc::CompletionQueue events_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
  gpr_timespec deadline_ = gpr_inf_future(GPR_CLOCK_MONOTONIC);  // then it is cancelled
  std::string group_;                                            // that its place belongs to
};

// Serves calls at an endpoint.
//
//   connections -> acceptor: new connections and new calls
//               -> a thread for each call: Handler, which reads and writes the call's messages
//
// gRPC receives data in the threads that wait for it. With poll(), a call's thread waits for the
// connection of its call, and the acceptor waits for all connections. If the acceptor receives a
// call's message, it has to wake the call's thread, so a step takes twice as many thread switches.
// While calls are open, the acceptor therefore pauses for 50 ms between short waits. New
// connections, new calls, and pings that arrive while a handler is busy may take that much longer.
//
// Thread safety: one thread makes, stops and destroys it. Handlers run in many threads at once.
// Closing: stop() ends all calls and waits for their handlers, as does the destructor.
class CallServer {
 public:
  // Returns the status that ends the call; an exception ends it with UNKNOWN.
  using Handler = std::function<grpc::Status(Call*)>;
  // The calls of a group that may be open at once. The limits of two groups are independent.
  struct Limit {
    std::string group;
    std::int64_t max_calls;
  };
  // Returns the limit that a method counts towards. The number of groups must be bounded.
  using Limits = std::function<Limit(const std::string& method)>;

  // Serves from now on. Calls beyond their limit end with RESOURCE_EXHAUSTED. Throws
  // ConnectionError as start_server() does, or if no thread can be started.
  CallServer(const Endpoint& endpoint, Limits limits, Handler handler);
  ~CallServer() { stop(std::chrono::milliseconds(0)); }
  CallServer(const CallServer&) = delete;
  CallServer& operator=(const CallServer&) = delete;

  // Refuses new calls, cancels those still open after `grace`, and waits for all handlers. The
  // second call does nothing.
  void stop(std::chrono::milliseconds grace) EXCLUDES(mutex_);

 private:
  void accept() EXCLUDES(mutex_);
  bool pause() EXCLUDES(mutex_);
  void request_call() REQUIRES(mutex_);
  void start(std::unique_ptr<Call> call) EXCLUDES(mutex_);
  grpc::Status admit(Call* call) EXCLUDES(mutex_);
  void release_refused(std::size_t looks);
  void serve(std::unique_ptr<Call> call) EXCLUDES(mutex_);
  void count_closed(const std::string& group) EXCLUDES(mutex_);

  const Limits limits_;
  const Handler handler_;
  grpc::AsyncGenericService calls_;
  std::unique_ptr<grpc::ServerCompletionQueue> arrivals_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Call> next_;                 // of the acceptor: what the next call becomes
  std::deque<std::unique_ptr<Call>> refused_;  // of the acceptor: their refusals are being sent
  Mutex mutex_;
  CondVar changed_;
  std::int64_t open_ GUARDED_BY(mutex_) = 0;                        // calls with a thread
  std::map<std::string, std::int64_t> open_in_ GUARDED_BY(mutex_);  // the same, by group
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread acceptor_;
};

}  // namespace torchbeast
