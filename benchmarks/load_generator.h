// SPDX-License-Identifier: Apache-2.0
// Generated hosts: many environment servers, or hosts that dial in, in one thread.

#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "libtorchbeast/proto/description.h"
#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast::load {

using Seconds = std::chrono::duration<double>;

struct LoadOptions {
  std::int64_t num_hosts = 1;
  std::int64_t envs_per_stream = 1;                 // E
  std::chrono::microseconds step_time = {};         // T: how long a step sleeps
  std::int64_t num_slow = 0;                        // hosts whose steps take slowness * T
  double slowness = 4;                              //
  Shape frame = {1, 84, 84};                        // uint8, at least 8 bytes
  std::int64_t frame_stack = 1;                     // see rpcenv.proto
  std::int64_t episode_steps = 1000;                // of every episode but the first
  std::string name = "generated";                   // host i is called name-i
  std::chrono::milliseconds connect_timeout{5000};  // as in servers/joining.py, and so are
  std::chrono::milliseconds first_pause{100};       // the pauses between two attempts,
  std::chrono::milliseconds longest_pause{10'000};  // which double and have jitter
};

// What all hosts have done so far.
struct LoadCounts {
  std::int64_t playing = 0;   // streams whose first step was sent and that have not ended
  std::int64_t steps = 0;     // of environments
  std::int64_t attempts = 0;  // to connect; or calls that were answered
  std::int64_t lost = 0;      // streams that ended while they played
  std::int64_t refused = 0;   // attempts that ended before the stream was played
  std::int64_t finished = 0;  // streams that were told that the run has ended
  std::vector<std::int64_t> by_host = {};  // steps of each host
};

// The E environments of one stream. Every frame shows which step of which environment it is:
//
//   bytes 0..3   n, the number of steps since the stream began    little endian, uint32
//   bytes 4..7   e, the environment's number in the stream
//   the others   e + 1, modulo 256
//
// An episode ends at step n if n + e is a multiple of `episode_steps`; the reward is 1 at an
// episode's last step, and 0 before. The actions have no effect.
class GeneratedEnvs {
 public:
  explicit GeneratedEnvs(const LoadOptions& options) : options_(options) {}

  static EnvDescription description(const LoadOptions& options);

  // Writes the first observations into a message, of which nothing is kept.
  void reset(rpcenv::VectorStep* message);
  // Turns the message of the last step into the next one.
  void step(rpcenv::VectorStep* message);

 private:
  void show(rpcenv::VectorStep* message) const;

  const LoadOptions& options_;
  std::int64_t n_ = 0;
};

// Plays hosts with one stream each, until stop(). It speaks the vector protocol with gRPC's
// asynchronous interface, so that a thousand hosts need one thread:
//
//   run(): operation of gRPC is done, or a pause is over -> GeneratedStream -> next operation
//
// Thread safety: one thread calls run(), once; any thread may call stop() and counts().
// Closing: stop() ends run() within 50 ms. The streams are cancelled.
class LoadGenerator {
 public:
  // Something that waits for one operation of gRPC, or for the end of a pause, at a time.
  class Waiter {
   public:
    explicit Waiter(LoadGenerator* generator) : generator_(generator) {
      generator_->waiters_.insert(this);
    }
    virtual ~Waiter() { generator_->waiters_.erase(this); }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

    // Ends what it waits for.
    virtual void cancel() = 0;
    void go_on(bool ok) { std::exchange(next_, nullptr)(ok); }

   protected:
    // Returns gRPC's tag for an operation after which `next` is called.
    void* then(std::function<void(bool ok)> next) {
      next_ = std::move(next);
      ++generator_->operations_;
      return this;
    }
    void pause(Seconds time, std::function<void(bool ok)> next) {
      next_ = std::move(next);
      const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(time);
      generator_->pauses_.push({end, this});
    }

    LoadGenerator* const generator_;

   private:
    std::function<void(bool ok)> next_;
  };

  explicit LoadGenerator(LoadOptions options);
  ~LoadGenerator();
  LoadGenerator(const LoadGenerator&) = delete;
  LoadGenerator& operator=(const LoadGenerator&) = delete;

  // Lets host i serve at the i-th endpoint, from now on. Throws like start_server().
  void serve(const std::vector<Endpoint>& endpoints);
  // Lets all hosts dial in to a learner, again and again until it says that its run has ended.
  void dial(const Endpoint& learner);

  void run();
  void stop() { is_stopped_ = true; }
  LoadCounts counts() const;

 private:
  friend class GeneratedStream;
  friend class DescribeCall;
  friend class DiallingStream;
  friend class ServedStream;

  struct Pause {
    Clock::time_point end;
    Waiter* waiter;
    bool operator<(const Pause& other) const { return end > other.end; }
  };

  void end_pauses();
  bool take_event();
  double random() { return std::uniform_real_distribution<double>(0, 1)(engine_); }

  const LoadOptions options_;
  std::mt19937_64 engine_{std::random_device{}()};
  std::atomic<bool> is_stopped_ = false;
  std::vector<std::atomic<std::int64_t>> steps_;  // of each host
  std::atomic<std::int64_t> playing_ = 0, attempts_ = 0, lost_ = 0, refused_ = 0, finished_ = 0;

  // Used by the thread of run().
  std::set<Waiter*> waiters_;
  std::set<std::int64_t> free_hosts_;  // that serve, and have no stream
  std::priority_queue<Pause> pauses_;
  std::int64_t operations_ = 0;  // that gRPC is doing
  std::int64_t connecting_ = 0;  // hosts
  rpcenv::RPCEnvServer::AsyncService service_;
  Credentials credentials_;  // of the servers
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<grpc::CompletionQueue> events_;
  grpc::ServerCompletionQueue* calls_ = nullptr;  // the same, if the hosts serve
};

}  // namespace torchbeast::load
