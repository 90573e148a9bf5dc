// SPDX-License-Identifier: Apache-2.0
// Serves calls of any method, each in a thread of its own that waits for its own socket.

#pragma once

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <cstdint>
#include <functional>
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

  // Waits for the operation that was started last. Returns whether it succeeded.
  bool is_done();
  // Sends the status, and waits until gRPC is through with the call. Cancels the call if that takes
  // longer than `patience`.
  void finish(const grpc::Status& status, std::chrono::milliseconds patience);

  grpc::CompletionQueue events_;
  grpc::GenericServerContext context_;
  grpc::GenericServerAsyncReaderWriter stream_{&context_};
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

  // Serves from now on. Further calls than max_calls end with RESOURCE_EXHAUSTED. Throws
  // ConnectionError as start_server() does.
  CallServer(const Endpoint& endpoint, std::int64_t max_calls, Handler handler);
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
  grpc::Status admit() EXCLUDES(mutex_);
  void serve(std::unique_ptr<Call> call) EXCLUDES(mutex_);
  void count_closed() EXCLUDES(mutex_);

  const std::int64_t max_calls_;
  const Handler handler_;
  grpc::AsyncGenericService calls_;
  std::unique_ptr<grpc::ServerCompletionQueue> arrivals_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Call> next_;  // of the acceptor: what the next call becomes
  Mutex mutex_;
  CondVar changed_;
  std::int64_t open_ GUARDED_BY(mutex_) = 0;  // calls with a thread
  bool stopping_ GUARDED_BY(mutex_) = false;
  std::thread acceptor_;
};

}  // namespace torchbeast
