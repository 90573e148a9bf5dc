// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/call_server.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <string>

#include "libtorchbeast/testing/servers.h"
#include "libtorchbeast/testing/threads.h"

namespace torchbeast {
namespace {

using testing::Notification;
using testing::TestFolder;

// How often a thread of this process has begun to wait.
long waits_of(pid_t thread) {
  std::ifstream status("/proc/self/task/" + std::to_string(thread) + "/status");
  std::string name;
  long count = 0;
  while (status >> name && name != "voluntary_ctxt_switches:") continue;
  status >> count;
  return count;
}

TEST(CallServerTest, AThreadThatWaitsForItsClientSleepsUntilItIsInterrupted) {
  const TestFolder folder;
  Notification waits, may_resume, resumed, read_again;
  Call* waiting = nullptr;
  pid_t thread = 0;
  const auto handler = [&](Call* call) {
    rpcenv::VectorAction message;
    EXPECT_TRUE(call->read(&message));
    waiting = call;
    thread = ::gettid();
    waits.notify();
    EXPECT_FALSE(call->read(&message));
    EXPECT_TRUE(call->is_reading());
    may_resume.wait();
    call->resume();
    resumed.notify();
    EXPECT_TRUE(call->read(&message));
    EXPECT_EQ(message.seed(), 2);
    read_again.notify();
    return grpc::Status::OK;
  };
  CallServer server(folder.address(),
                    {{"/rpcenv.RPCEnvServer/StreamingVectorEnv", {"streams", 1, handler}}});
  grpc::ClientContext context;
  const auto stub = rpcenv::RPCEnvServer::NewStub(open_channel(folder.address()));
  const auto stream = stub->StreamingVectorEnv(&context);
  rpcenv::VectorAction message;
  message.set_seed(1);
  ASSERT_TRUE(stream->Write(message));
  waits.wait();
  const long before = waits_of(thread);
  std::this_thread::sleep_for(10 * kPollInterval);  // what does not happen has no event
  EXPECT_LT(waits_of(thread) - before, 5);
  waiting->interrupt();
  waiting->interrupt();
  may_resume.notify();
  resumed.wait();
  message.set_seed(2);
  ASSERT_TRUE(stream->Write(message));
  read_again.wait();
  EXPECT_TRUE(stream->Finish().ok());
}

}  // namespace
}  // namespace torchbeast
