// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/endpoint.h"

#include <grpc/compression.h>
#include <grpc/grpc.h>
#include <grpc/support/time.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/security/auth_metadata_processor.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast {
namespace {

constexpr int kMaxHeaderBytes = 64 << 10;  // a traceback travels as a header
constexpr auto kCancelInterval = std::chrono::milliseconds(50);
// Between two attempts of a channel to connect; doubles. gRPC begins with a second.
constexpr auto kFirstRetry = std::chrono::milliseconds(50);
constexpr auto kLongestRetry = std::chrono::milliseconds(1000);
// Limit on what all clients have sent and nobody has read yet.
constexpr std::size_t kReceivedBytes = std::size_t{1} << 30;
// How much a server reads from a connection before it turns to the next. The connections of streams
// wait for their turn while strangers flood others; gRPC would read 4 MiB, which can take seconds.
constexpr int kReadAtOnce = 16 << 10;
constexpr int kHandshakeMs = 10'000;  // for a client to complete the TLS handshake
// Pings find a peer over TCP that is gone without a word: a machine without power, a pulled cable.
constexpr int kPingAfterMs = 20'000;    // of silence
constexpr int kPingTimeoutMs = 10'000;  // for the answer to a ping

// Refuses messages that are compressed: gRPC expands one before it compares its size with the
// limit. Frames are cheaper to send than to compress. `set` sets an integer argument of a channel.
template <typename Set>
void refuse_compression(const Set& set) {
  set(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1 << GRPC_COMPRESS_NONE);
#ifdef GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION
  // A client learns of the algorithm with the first message, which is expanded by then.
  set(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
#endif
}

// gRPC reduces a port above 65535 to its lower 16 bits, and port 0 asks for any free port.
bool is_requested_port(int bound, const Endpoint& endpoint) {
  const auto requested = endpoint.tcp_port();
  return !requested || *requested == "0" || *requested == std::to_string(bound);
}

void ping(grpc::ChannelArguments* arguments) {
  arguments->SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kPingAfterMs);
  arguments->SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
  // As many as it takes, because an environment's step may take minutes.
  arguments->SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
}

void ping(grpc::ServerBuilder* builder) {
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kPingAfterMs);
  builder->AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kPingTimeoutMs);
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Otherwise gRPC takes a client that pings more than once in five minutes for an attack.
  builder->AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                              kPingAfterMs / 2);
}

std::shared_ptr<grpc::ChannelCredentials> client_side(const Endpoint& endpoint) {
  const Credentials& own = endpoint.credentials;
  if (endpoint.unix_path() || !own.has_tls()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = own.ca;
  options.pem_cert_chain = own.certificate;
  options.pem_private_key = own.key;
  return grpc::SslCredentials(options);
}

// Refuses calls without the token before they wait for the server to accept them: gRPC queues any
// number of calls, even those that their clients have cancelled already. Only for TLS; gRPC asks
// nobody without it.
class Doorkeeper final : public grpc::AuthMetadataProcessor {
 public:
  explicit Doorkeeper(Credentials own) : own_(std::move(own)) {}

  bool IsBlocking() const override { return false; }
  grpc::Status Process(const InputMetadata& headers, grpc::AuthContext*, OutputMetadata*,
                       OutputMetadata*) override {
    return check_token(own_, headers);
  }

 private:
  const Credentials own_;
};

std::shared_ptr<grpc::ServerCredentials> server_side(const Endpoint& endpoint) {
  const Credentials& own = endpoint.credentials;
  if (endpoint.unix_path() || !own.has_tls()) return grpc::InsecureServerCredentials();
  if (own.certificate.empty()) {
    throw std::invalid_argument("cannot serve at " + endpoint.address +
                                ": a server that has a CA for its clients needs a certificate");
  }
  grpc::SslServerCredentialsOptions options(
      own.ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                     : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  options.pem_root_certs = own.ca;
  options.pem_key_cert_pairs.push_back({own.key, own.certificate});
  auto credentials = grpc::SslServerCredentials(options);
  if (!own.token.empty()) {
    credentials->SetAuthMetadataProcessor(std::make_shared<Doorkeeper>(own));
  }
  return credentials;
}

// Connects a channel, by pauses and waits of its own in place of gRPC's; see connected_channel().
//
//   wait() -> false, wait() -> false ... wait() -> true, channel()
//
// gRPC's sockets are served by the thread that waits for the channel's next state. Until the
// channel is connected, one such wait is open in `states_`; AsyncNext() gives it the time.
//
// Thread safety: one thread.
// Closing: the destructor returns at once. It ends a channel that is not connected, and with it the
// open wait.
class Connecting {
 public:
  explicit Connecting(std::shared_ptr<grpc::Channel> channel) : channel_(std::move(channel)) {
    // An invalid address or key: a wait for the state of this channel has no end.
    if (channel_->GetState(false) != GRPC_CHANNEL_TRANSIENT_FAILURE) look();
  }
  ~Connecting() {
    channel_.reset();
    states_.Shutdown();
    void* tag;
    bool ok;
    while (states_.Next(&tag, &ok)) continue;
  }
  Connecting(const Connecting&) = delete;
  Connecting& operator=(const Connecting&) = delete;

  // Waits for the next state, kCancelInterval at most. Returns whether the channel is connected.
  bool wait() {
    void* tag;
    bool ok;
    const auto until = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                    gpr_time_from_millis(kCancelInterval.count(), GPR_TIMESPAN));
    if (states_.AsyncNext(&tag, &ok, until) == grpc::CompletionQueue::GOT_EVENT) look();
    if (state_ == GRPC_CHANNEL_TRANSIENT_FAILURE) try_again();
    return state_ == GRPC_CHANNEL_READY;
  }

  std::shared_ptr<grpc::Channel> channel() const { return channel_; }

 private:
  void look() {
    state_ = channel_->GetState(true);
    if (state_ == GRPC_CHANNEL_READY) return;
    channel_->NotifyOnStateChange(state_, gpr_inf_future(GPR_CLOCK_MONOTONIC), &states_, nullptr);
  }

  // gRPC would do so too, but by a timer.
  void try_again() {
    if (Clock::now() < again_at_) return;
    grpc::experimental::ChannelResetConnectionBackoff(channel_.get());
    pause_ = std::min(2 * pause_, kLongestRetry);
    again_at_ = Clock::now() + pause_;
  }

  std::shared_ptr<grpc::Channel> channel_;
  grpc::CompletionQueue states_;
  grpc_connectivity_state state_ = GRPC_CHANNEL_TRANSIENT_FAILURE;
  std::chrono::milliseconds pause_ = kFirstRetry;
  Clock::time_point again_at_ = Clock::now() + kFirstRetry;
};

}  // namespace

Endpoint::Endpoint(std::string address, Credentials credentials)
    : address(std::move(address)), credentials(std::move(credentials)) {
  check(this->credentials);
}

std::optional<std::string> Endpoint::unix_path() const {
  if (!address.starts_with("unix:")) return std::nullopt;
  const std::string path = address.substr(5);
  return path.starts_with("//") ? path.substr(2) : path;
}

std::optional<std::string> Endpoint::tcp_port() const {
  const std::size_t colon = address.rfind(':');
  if (unix_path() || colon == std::string::npos) return std::nullopt;
  const std::string port = address.substr(colon + 1);
  if (port.empty() || port.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  return port;
}

std::string Endpoint::target() const {
  return tls_name() ? address.substr(address.find('@') + 1) : address;
}

std::optional<std::string> Endpoint::tls_name() const {
  const std::size_t at = address.find('@');
  if (unix_path() || at == std::string::npos) return std::nullopt;
  return address.substr(0, at);
}

// Makes gRPC wait for sockets with poll() instead of epoll, unless the user chose a strategy or
// gRPC has started already.
//
// With epoll, whichever thread is waiting receives the messages of every stream and wakes the
// thread that each belongs to. Here every stream has its own connection and its own thread, at both
// ends; with poll() each thread waits for its own socket, which doubles the messages per second.
// gRPC reads the choice once, when it starts, and only from the environment. The variable is
// removed again because child processes may use gRPC in other ways.
//
// A channel, which connects nowhere, keeps gRPC's own threads: gRPC 1.51 ends them with the last
// channel, and waits for them without end if the system could not start them.
void choose_polling() {
  constexpr auto kVariable = "GRPC_POLL_STRATEGY";
  static const bool chosen_by_user = [] {
    if (std::getenv(kVariable) != nullptr) return true;
    ::setenv(kVariable, "poll", 1);
    grpc_init();  // never shut down: restarting would read the variable again
    ::unsetenv(kVariable);
    return false;
  }();
  static_cast<void>(chosen_by_user);
  // Nothing reads it, but without volatile no pointer would be left for LeakSanitizer to find.
  static auto* volatile const kept = new std::shared_ptr<grpc::Channel>(
      grpc::CreateChannel("unix:", grpc::InsecureChannelCredentials()));
  static_cast<void>(kept);
}

std::shared_ptr<grpc::Channel> open_channel(const Endpoint& endpoint) {
  choose_polling();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(codec::kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(codec::kMaxMessageBytes);
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, kMaxHeaderBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  refuse_compression([&](const char* name, int value) { arguments.SetInt(name, value); });
  // One connection per stream, so that streams do not share one transport's lock.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  if (!endpoint.unix_path()) ping(&arguments);
  if (const auto name = endpoint.tls_name()) arguments.SetSslTargetNameOverride(*name);
  return grpc::CreateCustomChannel(endpoint.target(), client_side(endpoint), arguments);
}

std::unique_ptr<grpc::ClientContext> new_context(const Endpoint& endpoint) {
  auto context = std::make_unique<grpc::ClientContext>();
  add_token(endpoint.credentials, context.get());
  return context;
}

std::shared_ptr<grpc::Channel> connected_channel(const Endpoint& endpoint,
                                                 std::chrono::milliseconds timeout,
                                                 const std::function<bool()>& keep_waiting) {
  const auto deadline = Clock::now() + timeout;
  Connecting connecting(open_channel(endpoint));
  while (keep_waiting()) {
    if (connecting.wait()) return connecting.channel();
    if (Clock::now() >= deadline) break;
  }
  return nullptr;
}

std::unique_ptr<grpc::Server> start_server(const Endpoint& endpoint, grpc::ServerBuilder* builder,
                                           std::chrono::milliseconds max_idle) {
  choose_polling();
  int port = 0;
  grpc::ResourceQuota quota;
  quota.Resize(kReceivedBytes);
  builder->SetResourceQuota(quota);
  builder->SetMaxReceiveMessageSize(codec::kMaxMessageBytes);
  builder->SetMaxSendMessageSize(codec::kMaxMessageBytes);
  refuse_compression(
      [&](const char* name, int value) { builder->AddChannelArgument(name, value); });
  builder->AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder->AddChannelArgument(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, kReadAtOnce);
  builder->AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder->AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, static_cast<int>(max_idle.count()));
  if (!endpoint.unix_path()) ping(builder);
  builder->AddListeningPort(endpoint.address, server_side(endpoint), &port);
  std::unique_ptr<grpc::Server> server = builder->BuildAndStart();
  if (server == nullptr || port == 0 || !is_requested_port(port, endpoint)) {
    const bool has_tls = !endpoint.unix_path() && endpoint.credentials.has_tls();
    throw ConnectionError("cannot serve at " + endpoint.address +
                          ": the address is in use or cannot be bound" +
                          (has_tls ? ", or the certificate or its key cannot be used" : ""));
  }
  return server;
}

}  // namespace torchbeast
