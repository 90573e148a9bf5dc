// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/endpoint.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include "libtorchbeast/support/errors.h"
#include "libtorchbeast/testing/servers.h"
#include "libtorchbeast/testing/values.h"

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
  const auto server = start_server(folder.address(), {&service});
  const auto channel = connected_channel(folder.address(), kPatience);
  EXPECT_EQ(channel->GetState(false), GRPC_CHANNEL_READY);
}

TEST(EndpointTest, AChannelIsTriedAgainUntilItsServerListens) {
  TestFolder folder;
  EmptyService service;
  std::unique_ptr<grpc::Server> server;
  int waits = 0;
  const auto channel = connected_channel(folder.address(), kPatience, [&] {
    if (++waits == 10) server = start_server(folder.address(), {&service});
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

TEST(EndpointTest, APortThatNoSocketCanHaveIsRefusedByItsAddress) {
  EmptyService service;
  EXPECT_EQ(message_of<ConnectionError>([&] { start_server({"localhost:65537"}, {&service}); }),
            "cannot serve at localhost:65537: the address is in use or cannot be bound");
}

}  // namespace
}  // namespace torchbeast
