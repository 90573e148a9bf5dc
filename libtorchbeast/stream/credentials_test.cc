// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/credentials.h"

#include <gtest/gtest.h>

#include "libtorchbeast/server/env_server.h"
#include "libtorchbeast/stream/describe.h"
#include "libtorchbeast/stream/env_stream.h"
#include "libtorchbeast/stream/server_status.h"
#include "libtorchbeast/testing/fake_env.h"
#include "libtorchbeast/testing/servers.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using testing::fake_env;
using testing::kPatience;
using testing::message_of;
using testing::RunningServer;
using testing::TestFolder;

constexpr char kToken[] = "0123456789abcdef";

TEST(CredentialsTest, OnlyTheWholeSecretIsEqual) {
  EXPECT_TRUE(equal_in_constant_time(kToken, kToken));
  for (const char* given : {"", "0", "0123456789abcde", "0123456789abcdefg", "1123456789abcdef",
                            "0123456789abcdeF", "0123456789abcdef0123456789abcdef"}) {
    EXPECT_FALSE(equal_in_constant_time(kToken, given)) << given;
  }
  EXPECT_FALSE(equal_in_constant_time("", "0"));
}

TEST(CredentialsTest, ATokenThatNoCallCanCarryIsRefusedAndNotPrinted) {
  for (const char* token : {"two words", "line\n", "tab\t", "\xc3\xa9t\xc3\xa9", "\x7f"}) {
    EXPECT_EQ(message_of<std::invalid_argument>([&] { Endpoint("localhost:1", {.token = token}); }),
              "a token must be printable ASCII without spaces");
  }
}

TEST(CredentialsTest, ACertificateNeedsItsKey) {
  EXPECT_THROW(Endpoint("localhost:1", {.certificate = "one"}), std::invalid_argument);
  EXPECT_THROW(Endpoint("localhost:1", {.key = "one"}), std::invalid_argument);
}

// A server whose calls need the token, and which counts the environments that it makes.
class GuardedServer {
 public:
  GuardedServer()
      : server_(
            [this] {
              ++made;
              return fake_env()();
            },
            Endpoint(folder_.address(), {.token = kToken})) {}

  Endpoint with(const std::string& token) const { return {folder_.address(), {.token = token}}; }

  std::atomic<int> made = 0;

 private:
  TestFolder folder_;
  RunningServer server_;
};

TEST(CredentialsTest, ALearnerWithTheTokenPlays) {
  GuardedServer server;
  const Endpoint endpoint = server.with(kToken);
  EXPECT_EQ(describe_server(endpoint, kPatience).num_envs, 1);
  EXPECT_EQ(server.made, 1) << "Describe makes one to describe";
  EnvStream stream(endpoint, kPatience);
  stream.connect(1, kPatience);
  EXPECT_EQ(server.made, 2);
  EXPECT_EQ(ask_status(endpoint, kPatience).open_streams, 1);
  stream.close();
}

TEST(CredentialsTest, ALearnerWithAnotherTokenOrNoneIsRefusedBeforeAnEnvironmentIsMade) {
  GuardedServer server;
  for (const std::string token : {"", "0123456789abcde", "0123456789abcdefg"}) {
    const Endpoint endpoint = server.with(token);
    EXPECT_THROW(describe_server(endpoint, kPatience), Unauthenticated);
    EXPECT_THROW(ask_status(endpoint, kPatience), Unauthenticated);
    EXPECT_THROW(EnvStream(endpoint, kPatience).connect(1, kPatience), Unauthenticated);
  }
  const std::string refusal =
      message_of<Unauthenticated>([&] { describe_server(server.with("another"), kPatience); });
  EXPECT_NE(refusal.find("must be a copy of the file"), std::string::npos) << refusal;
  EXPECT_EQ(refusal.find(kToken), std::string::npos) << "the message may not tell the secret";
  EXPECT_EQ(server.made, 0);
}

TEST(CredentialsTest, AServerCountsItsStreamsAndSteps) {
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = 3}), folder.address());
  EXPECT_EQ(ask_status(folder.address(), kPatience).steps, 0);
  EnvStream stream(folder.address(), kPatience);
  StreamStep step = stream.connect(1, kPatience);
  for (int i = 0; i < 2; ++i) {
    const Array& frame = step.observation.as_map().at("frame").as_leaf();
    Array action(DType::kInt64, {1, 3});
    std::copy_n(frame.as<std::int32_t>(), 3, action.as<std::int64_t>());
    step = stream.step(ArrayNest(action));
  }
  const ServerStatus playing = ask_status(folder.address(), kPatience);
  EXPECT_EQ(playing.open_streams, 1);
  EXPECT_EQ(playing.steps, 6);
  EXPECT_GT(playing.uptime_s, 0);
  stream.close();
  EXPECT_EQ(ask_status(folder.address(), kPatience).open_streams, 0);
}

}  // namespace
}  // namespace torchbeast
