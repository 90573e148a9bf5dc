// SPDX-License-Identifier: Apache-2.0

#include "benchmarks/load_generator.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "libtorchbeast/proto/array_codec.h"

namespace torchbeast::load {
namespace {

constexpr std::size_t kCounterBytes = 8;
constexpr std::chrono::milliseconds kLook{50};  // at stop()
// A thousand machines have a core each for their handshakes; this thread would have none complete
// before its time limit.
constexpr std::int64_t kMostConnecting = 32;
constexpr std::chrono::milliseconds kTurn{100};  // between two looks whether a host may connect

// The elements of an array in a message, to be changed in place.
template <typename T>
T* elements(rpcenv::NDArray* array) {
  return reinterpret_cast<T*>(array->mutable_data()->data());
}

std::shared_ptr<grpc::ServerCredentials> credentials_of(const Endpoint& endpoint) {
  const Credentials& own = endpoint.credentials;
  if (endpoint.unix_path() || !own.has_tls()) return grpc::InsecureServerCredentials();
  grpc::SslServerCredentialsOptions options;
  options.pem_key_cert_pairs.push_back({own.key, own.certificate});
  return grpc::SslServerCredentials(options);
}

gpr_timespec after(Clock::duration time) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(time);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_micros(std::max<std::int64_t>(us.count(), 0), GPR_TIMESPAN));
}

}  // namespace

// ---- Environments ------------------------------------------------------------------------------

EnvDescription GeneratedEnvs::description(const LoadOptions& options) {
  return {.env_id = "Generated-v0",
          .num_envs = options.envs_per_stream,
          .num_servers = options.num_hosts,
          .frame_stack = options.frame_stack,
          .observation = ArrayNest(Array::spec(DType::kUInt8, options.frame)),
          .action_space = R"({"type": "Discrete", "n": 6, "start": 0})"};
}

void GeneratedEnvs::reset(rpcenv::VectorStep* message) {
  n_ = 0;
  message->Clear();
  const Shape each{options_.envs_per_stream};
  Shape frames = each;
  frames.insert(frames.end(), options_.frame.begin(), options_.frame.end());
  Array observation(DType::kUInt8, frames);
  const std::size_t size = observation.num_bytes() / static_cast<std::size_t>(each[0]);
  for (std::int64_t e = 0; e < each[0]; ++e) {
    std::memset(observation.data() + size * static_cast<std::size_t>(e), static_cast<int>(e + 1),
                size);
  }
  codec::encode(ArrayNest(observation), message->mutable_observation());
  codec::encode(Array::zeros(DType::kFloat32, each), message->mutable_reward());
  codec::encode(Array::zeros(DType::kBool, each), message->mutable_terminated());
  codec::encode(Array::zeros(DType::kBool, each), message->mutable_truncated());
  codec::encode(Array::zeros(DType::kBool, each), message->mutable_episode_end());
  codec::encode(Array::zeros(DType::kInt32, each), message->mutable_episode_step());
  codec::encode(Array::zeros(DType::kFloat32, each), message->mutable_episode_return());
  show(message);
  std::fill_n(elements<bool>(message->mutable_terminated()), each[0], true);
}

void GeneratedEnvs::step(rpcenv::VectorStep* message) {
  ++n_;
  show(message);
}

// Writes what differs between two steps.
void GeneratedEnvs::show(rpcenv::VectorStep* message) const {
  std::string* frames = message->mutable_observation()->mutable_array()->mutable_data();
  const std::int64_t num_envs = options_.envs_per_stream, length = options_.episode_steps;
  const std::size_t size = frames->size() / static_cast<std::size_t>(num_envs);
  for (std::int64_t e = 0; e < num_envs; ++e) {
    const std::uint32_t counter[2] = {static_cast<std::uint32_t>(n_),
                                      static_cast<std::uint32_t>(e)};
    std::memcpy(frames->data() + size * static_cast<std::size_t>(e), counter, sizeof(counter));
    const bool is_over = n_ > 0 && (n_ + e) % length == 0;
    const std::int64_t in_episode = n_ == 0 ? 0 : (n_ + e - 1) % length + 1;
    elements<float>(message->mutable_reward())[e] = is_over ? 1 : 0;
    elements<float>(message->mutable_episode_return())[e] = is_over ? 1 : 0;
    elements<bool>(message->mutable_terminated())[e] = is_over;
    elements<bool>(message->mutable_episode_end())[e] = is_over;
    elements<std::int32_t>(message->mutable_episode_step())[e] =
        static_cast<std::int32_t>(std::min(n_, in_episode));
  }
}

// ---- Streams -----------------------------------------------------------------------------------

// One stream, from its first action on:
//
//   start() -> write the first step -> read an action -> sleep T -> write a step -> read ...
//                                      no more actions -> ended()
class GeneratedStream : public LoadGenerator::Waiter {
 protected:
  GeneratedStream(LoadGenerator* generator, std::int64_t host)
      : Waiter(generator), host_(host), envs_(generator->options_) {}

  virtual rpcenv::VectorStep* message() = 0;
  virtual void begin_write(void* tag) = 0;
  virtual void begin_read(rpcenv::VectorAction* action, void* tag) = 0;
  // The other end reads or sends nothing more.
  virtual void ended() = 0;

  void start() {
    ++generator_->playing_;
    is_playing_ = true;
    envs_.reset(message());
    // Otherwise hosts that begin together would step together.
    pause(generator_->random() * step_time(), [this](bool) { write(); });
  }
  // Returns whether the stream was being played.
  bool stop_playing() {
    if (is_playing_) --generator_->playing_;
    return std::exchange(is_playing_, false);
  }

  std::int64_t host_;

 private:
  Seconds step_time() const {
    const LoadOptions& options = generator_->options_;
    return (host_ < options.num_slow ? options.slowness : 1) * options.step_time;
  }

  void write() {
    begin_write(then([this](bool ok) { ok ? read() : ended(); }));
  }
  void read() {
    begin_read(&action_, then([this](bool ok) { ok ? sleep() : ended(); }));
  }
  void sleep() {
    pause(step_time(), [this](bool) { step(); });
  }
  void step() {
    envs_.step(message());
    generator_->steps_[static_cast<std::size_t>(host_)] += generator_->options_.envs_per_stream;
    write();
  }

  GeneratedEnvs envs_;
  bool is_playing_ = false;
  rpcenv::VectorAction action_;
};

// The stream of a host that dials in, and dials again when it is lost; as servers/joining.py does.
class DiallingStream final : public GeneratedStream {
 public:
  DiallingStream(LoadGenerator* generator, std::int64_t host, Endpoint learner)
      : GeneratedStream(generator, host), learner_(std::move(learner)) {
    pause({}, [this](bool) { dial(); });
  }

  void cancel() override {
    if (context_ != nullptr) context_->TryCancel();
    channel_.reset();  // ends a wait for its state
  }

 private:
  rpcenv::VectorStep* message() override { return message_.mutable_step(); }
  void begin_write(void* tag) override { call_->Write(message_, tag); }
  void begin_read(rpcenv::VectorAction* action, void* tag) override { call_->Read(action, tag); }

  void dial() {
    if (generator_->connecting_ >= kMostConnecting) {
      return pause(kTurn * generator_->random(), [this](bool) { dial(); });
    }
    ++generator_->connecting_;
    ++generator_->attempts_;
    channel_ = open_channel(learner_);
    until_ = Clock::now() + generator_->options_.connect_timeout;
    watch();
  }

  void watch() {
    if (channel_ == nullptr) return;  // cancelled
    const auto state = channel_->GetState(true);
    if (state == GRPC_CHANNEL_READY || Clock::now() >= until_) {
      --generator_->connecting_;
      return state == GRPC_CHANNEL_READY ? join() : try_again();
    }
    channel_->NotifyOnStateChange(state, after(until_ - Clock::now()), generator_->events_.get(),
                                  then([this](bool) { watch(); }));
  }

  void join() {
    context_ = new_context(learner_);
    stub_ = rpcenv::RPCLearner::NewStub(channel_);
    call_ = stub_->AsyncJoin(context_.get(), generator_->events_.get(),
                             then([this](bool ok) { ok ? describe() : ended(); }));
  }

  void describe() {
    const LoadOptions& options = generator_->options_;
    message_.Clear();
    codec::encode(GeneratedEnvs::description(options),
                  message_.mutable_joining()->mutable_description());
    message_.mutable_joining()->set_host(options.name + "-" + std::to_string(host_));
    call_->Write(message_, then([this](bool ok) { ok ? wait_to_be_taken() : ended(); }));
  }

  void wait_to_be_taken() {
    call_->Read(&first_, then([this](bool ok) {
      if (!ok) return ended();
      message_.Clear();
      pause_ = {};
      start();
    }));
  }

  void ended() override {
    call_->Finish(&status_, then([this](bool) {
      ++(status_.ok()     ? generator_->finished_
         : stop_playing() ? generator_->lost_
                          : generator_->refused_);
      stop_playing();
      call_.reset();
      context_.reset();
      if (!status_.ok()) try_again();
    }));
  }

  void try_again() {
    const LoadOptions& options = generator_->options_;
    stub_.reset();
    channel_.reset();
    pause_ = std::clamp(2 * pause_, options.first_pause, options.longest_pause);
    pause(pause_ * (0.5 + generator_->random() / 2), [this](bool) { dial(); });
  }

  const Endpoint learner_;
  std::shared_ptr<grpc::Channel> channel_;
  Clock::time_point until_;  // when an attempt to connect is given up
  std::chrono::milliseconds pause_{};
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<rpcenv::RPCLearner::Stub> stub_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<rpcenv::HostMessage, rpcenv::VectorAction>> call_;
  rpcenv::HostMessage message_;
  rpcenv::VectorAction first_;
  grpc::Status status_;
};

// A call that a learner has opened, or will open. When it has begun, the next one is requested.
class ServedStream final : public GeneratedStream {
 public:
  explicit ServedStream(LoadGenerator* generator) : GeneratedStream(generator, -1) {
    generator_->service_.RequestStreamingVectorEnv(
        &context_, &call_, generator_->calls_, generator_->calls_,
        then([this](bool ok) { ok ? begin() : delete this; }));
  }
  ~ServedStream() override {
    stop_playing();
    if (host_ >= 0) generator_->free_hosts_.insert(host_);
  }

  void cancel() override {}  // the server cancels its calls

 private:
  rpcenv::VectorStep* message() override { return &message_; }
  void begin_write(void* tag) override { call_.Write(message_, tag); }
  void begin_read(rpcenv::VectorAction* action, void* tag) override { call_.Read(action, tag); }

  void begin() {
    ++generator_->attempts_;
    if (!generator_->is_stopped_) new ServedStream(generator_);
    const auto status = check_token(generator_->credentials_, context_.client_metadata());
    if (!status.ok()) return finish(status);
    std::set<std::int64_t>& hosts = generator_->free_hosts_;
    if (hosts.empty()) return finish({grpc::StatusCode::RESOURCE_EXHAUSTED, "too many streams"});
    host_ = hosts.extract(hosts.begin()).value();
    call_.Read(&first_, then([this](bool ok) { ok ? start() : ended(); }));
  }

  void ended() override {
    if (stop_playing()) ++generator_->lost_;
    finish(grpc::Status::OK);
  }

  void finish(const grpc::Status& status) {
    if (!status.ok()) ++generator_->refused_;
    call_.Finish(status, then([this](bool) { delete this; }));
  }

  grpc::ServerContext context_;
  grpc::ServerAsyncReaderWriter<rpcenv::VectorStep, rpcenv::VectorAction> call_{&context_};
  rpcenv::VectorStep message_;
  rpcenv::VectorAction first_;
};

// Answers a question for the description, and requests the next one.
class DescribeCall final : public LoadGenerator::Waiter {
 public:
  explicit DescribeCall(LoadGenerator* generator) : Waiter(generator) {
    generator_->service_.RequestDescribe(&context_, &request_, &answer_, generator_->calls_,
                                         generator_->calls_,
                                         then([this](bool ok) { ok ? begin() : delete this; }));
  }

  void cancel() override {}

 private:
  void begin() {
    if (!generator_->is_stopped_) new DescribeCall(generator_);
    rpcenv::Description description;
    codec::encode(GeneratedEnvs::description(generator_->options_), &description);
    answer_.Finish(description, check_token(generator_->credentials_, context_.client_metadata()),
                   then([this](bool) { delete this; }));
  }

  grpc::ServerContext context_;
  rpcenv::DescribeRequest request_;
  grpc::ServerAsyncResponseWriter<rpcenv::Description> answer_{&context_};
};

// ---- The thread --------------------------------------------------------------------------------

LoadGenerator::LoadGenerator(LoadOptions options)
    : options_(std::move(options)), steps_(static_cast<std::size_t>(options_.num_hosts)) {
  const std::int64_t bytes = num_elements(options_.frame);
  if (bytes < static_cast<std::int64_t>(kCounterBytes)) {
    throw std::invalid_argument("a frame needs at least 8 bytes for its counters, got " +
                                std::to_string(bytes));
  }
}

LoadGenerator::~LoadGenerator() {
  stop();
  if (events_ != nullptr) run();
}

void LoadGenerator::serve(const std::vector<Endpoint>& endpoints) {
  grpc::ServerBuilder builder;
  builder.RegisterService(&service_);
  auto calls = builder.AddCompletionQueue();
  for (std::size_t i = 1; i < endpoints.size(); ++i) {
    builder.AddListeningPort(endpoints[i].address, credentials_of(endpoints[i]));
  }
  credentials_ = endpoints.at(0).credentials;
  server_ = start_server(endpoints[0], &builder);
  calls_ = calls.get();
  events_ = std::move(calls);
  for (std::int64_t host = 0; host < options_.num_hosts; ++host) free_hosts_.insert(host);
  new ServedStream(this);
  new DescribeCall(this);
}

void LoadGenerator::dial(const Endpoint& learner) {
  events_ = std::make_unique<grpc::CompletionQueue>();
  for (std::int64_t host = 0; host < options_.num_hosts; ++host) {
    new DiallingStream(this, host, learner);
  }
}

void LoadGenerator::run() {
  while (!is_stopped_) {
    end_pauses();
    take_event();
  }
  pauses_ = {};
  std::thread shutdown([this] {  // it waits for operations
    if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
  });
  for (Waiter* waiter : waiters_) waiter->cancel();
  while (operations_ > 0) {
    take_event();
    pauses_ = {};
  }
  shutdown.join();
  while (!waiters_.empty()) delete *waiters_.begin();
  events_->Shutdown();
  void* tag;
  bool ok;
  while (events_->Next(&tag, &ok)) continue;
  events_.reset();
}

void LoadGenerator::end_pauses() {
  const auto now = Clock::now();
  while (!pauses_.empty() && pauses_.top().end <= now) {
    Waiter* waiter = pauses_.top().waiter;
    pauses_.pop();
    waiter->go_on(true);
  }
}

// Waits for an operation, until the next pause ends.
bool LoadGenerator::take_event() {
  Clock::duration longest = kLook;
  if (!pauses_.empty()) longest = std::min(longest, pauses_.top().end - Clock::now());
  void* tag;
  bool ok;
  if (events_->AsyncNext(&tag, &ok, after(longest)) != grpc::CompletionQueue::GOT_EVENT) {
    return false;
  }
  --operations_;
  static_cast<Waiter*>(tag)->go_on(ok);
  return true;
}

LoadCounts LoadGenerator::counts() const {
  LoadCounts counts{.playing = playing_,
                    .attempts = attempts_,
                    .lost = lost_,
                    .refused = refused_,
                    .finished = finished_};
  for (const auto& steps : steps_) counts.by_host.push_back(steps);
  for (const std::int64_t steps : counts.by_host) counts.steps += steps;
  return counts;
}

}  // namespace torchbeast::load
