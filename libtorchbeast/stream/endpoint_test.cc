// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/endpoint.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/testing/fake_env.h"
#include "libtorchbeast/testing/servers.h"
#include "libtorchbeast/testing/values.h"

// gRPC's own, in the versions that have it.
__attribute__((weak)) const char* grpc_get_poll_strategy_name();

namespace torchbeast {
namespace {

using namespace std::chrono_literals;
using testing::kPatience;
using testing::message_of;
using testing::TestFolder;

TEST(EndpointTest, AUnixAddressNamesAPathWithOrWithoutTwoSlashes) {
  EXPECT_EQ(Endpoint("unix:/tmp/socket").unix_path(), "/tmp/socket");
  EXPECT_EQ(Endpoint("unix:///tmp/socket").unix_path(), "/tmp/socket");
  EXPECT_EQ(Endpoint("unix:relative").unix_path(), "relative");
  EXPECT_EQ(Endpoint("unix:").unix_path(), "");
  EXPECT_EQ(Endpoint("localhost:80").unix_path(), std::nullopt);
}

TEST(EndpointTest, ATcpAddressNamesAPort) {
  EXPECT_EQ(Endpoint("localhost:8000").tcp_port(), "8000");
  EXPECT_EQ(Endpoint("[::1]:8000").tcp_port(), "8000");
  EXPECT_EQ(Endpoint("localhost").tcp_port(), std::nullopt);
  EXPECT_EQ(Endpoint("localhost:http").tcp_port(), std::nullopt);
  EXPECT_EQ(Endpoint("unix:/tmp/socket:8000").tcp_port(), std::nullopt);
}

TEST(EndpointTest, AnAddressMayStateTheNameInTheCertificate) {
  EXPECT_EQ(Endpoint("actors.lab@10.0.0.1:80").target(), "10.0.0.1:80");
  EXPECT_EQ(Endpoint("actors.lab@10.0.0.1:80").tls_name(), "actors.lab");
  EXPECT_EQ(Endpoint("10.0.0.1:80").target(), "10.0.0.1:80");
  EXPECT_EQ(Endpoint("10.0.0.1:80").tls_name(), std::nullopt);
  EXPECT_EQ(Endpoint("unix:/a@b").target(), "unix:/a@b");
}

// A service without calls, for tests of whether a server listens.
class EmptyService final : public rpcenv::RPCEnvServer::Service {};

TEST(EndpointTest, AChannelConnectsToAServerThatListensAtItsEndpoint) {
  TestFolder folder;
  EmptyService service;
  EXPECT_EQ(connected_channel(folder.address(), 10ms), nullptr);
  const auto server = testing::serve(folder.address(), &service);
  const auto channel = connected_channel(folder.address(), kPatience);
  EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
}

TEST(EndpointTest, AChannelIsTriedAgainUntilItsServerListens) {
  TestFolder folder;
  EmptyService service;
  std::unique_ptr<grpc::Server> server;
  int waits = 0;
  const auto channel = connected_channel(folder.address(), kPatience, [&] {
    if (++waits == 10) server = testing::serve(folder.address(), &service);
    return true;
  });
  EXPECT_NE(channel, nullptr);
  EXPECT_GE(waits, 10);
}

TEST(EndpointTest, AWaitForAConnectionEndsWhenNobodyNeedsItAnyMore) {
  TestFolder folder;
  EXPECT_EQ(connected_channel(folder.address(), kPatience, [] { return false; }), nullptr);
}

TEST(EndpointTest, AnAddressThatCannotBeOneHasNoConnection) {
  EXPECT_EQ(connected_channel({"dns://"}, 100ms), nullptr);
}

// A connection of which a client has said nothing but that it speaks HTTP/2.
class SilentClient {
 public:
  explicit SilentClient(const std::string& path) : socket_(::socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
    path.copy(address.sun_path, sizeof(address.sun_path) - 1);
    const timeval patience{.tv_sec = kPatience / 1s, .tv_usec = 0};
    ::setsockopt(socket_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    const int connected =
        ::connect(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
    // RFC 9113, 3.4: the preface, then a SETTINGS frame, which may be empty.
    const std::string hello =
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string("\0\0\0\4\0\0\0\0\0", 9);
    EXPECT_EQ(connected, 0);
    EXPECT_EQ(::write(socket_, hello.data(), hello.size()), std::ssize(hello));
  }
  ~SilentClient() { ::close(socket_); }
  SilentClient(const SilentClient&) = delete;
  SilentClient& operator=(const SilentClient&) = delete;

  // Reads all that the server sends; returns whether it then closes the connection.
  bool is_closed() {
    char buffer[1024];
    ssize_t received;
    do received = ::read(socket_, buffer, sizeof(buffer));
    while (received > 0);
    return received == 0 || errno == ECONNRESET;
  }

 private:
  int socket_;
};

TEST(EndpointTest, AConnectionThatMakesNoCallIsClosed) {
  TestFolder folder;
  EmptyService service;
  const auto server = testing::serve(folder.address(), &service, 50ms);
  EXPECT_TRUE(SilentClient(*Endpoint(folder.address()).unix_path()).is_closed());
}

// A service whose calls wait for messages of the client.
class WaitingService final : public rpcenv::RPCEnvServer::Service {
  grpc::Status StreamingEnv(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<rpcenv::Step, rpcenv::Action>* stream) override {
    rpcenv::Action action;
    while (stream->Read(&action)) continue;
    return grpc::Status::OK;
  }
};

TEST(EndpointTest, AConnectionWithACallStaysOpenHoweverSilentTheCallIs) {
  TestFolder folder;
  WaitingService service;
  const auto server = testing::serve(folder.address(), &service, 50ms);
  const auto channel = connected_channel(folder.address(), kPatience);
  grpc::ClientContext context;
  const auto call = rpcenv::RPCEnvServer::NewStub(channel)->StreamingEnv(&context);
  const auto later = std::chrono::system_clock::now() + 500ms;
  EXPECT_FALSE(channel->WaitForStateChange(GRPC_CHANNEL_READY, later));
  EXPECT_TRUE(call->Write({}));
  context.TryCancel();
}

TEST(EndpointTest, TheseTestsPollAsTheProgramsDo) {
  if (grpc_get_poll_strategy_name == nullptr) GTEST_SKIP() << "this gRPC does not say how it polls";
  if (std::getenv("GRPC_POLL_STRATEGY") != nullptr) GTEST_SKIP() << "the user has chosen";
  const testing::TestFolder folder;
  const testing::RunningServer server(testing::fake_env(), folder.address());
  EXPECT_STREQ(grpc_get_poll_strategy_name(), "poll");
}

TEST(EndpointTest, APortThatNoSocketCanHaveIsRefusedByItsAddress) {
  EmptyService service;
  EXPECT_EQ(message_of<ConnectionError>([&] { testing::serve({"localhost:65537"}, &service); }),
            "cannot serve at localhost:65537: the address is in use or cannot be bound");
}

}  // namespace
}  // namespace torchbeast
