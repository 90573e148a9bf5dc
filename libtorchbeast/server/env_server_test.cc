// SPDX-License-Identifier: Apache-2.0
//
// The server, spoken to in the raw protocol: what it says in which order, and how it ends.

#include "libtorchbeast/server/env_server.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <fstream>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/testing/fake_env.h"
#include "libtorchbeast/testing/servers.h"
#include "libtorchbeast/testing/threads.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using testing::array_of;
using testing::Background;
using testing::fake_env;
using testing::message_of;
using testing::Notification;
using testing::RunningServer;
using testing::TestFolder;
using testing::values_of;

using Stub = rpcenv::RPCEnvServer::Stub;

std::unique_ptr<Stub> stub_for(const std::string& address) {
  return rpcenv::RPCEnvServer::NewStub(open_channel(address));
}

// A learner that knows the original protocol only.
class OriginalClient {
 public:
  explicit OriginalClient(const std::string& address)
      : stub_(stub_for(address)), stream_(stub_->StreamingEnv(&context_)) {}

  bool read() { return stream_->Read(&step); }

  bool act(const Array& action) {
    rpcenv::Action message;
    codec::encode(ArrayNest(action), message.mutable_nest_action());
    return stream_->Write(message) && read();
  }

  // The newest frame is the only action that a FakeGame takes.
  std::int32_t newest() const {
    return values_of<std::int32_t>(codec::decode(step.observation()).as_map().at("frame").as_leaf())
        .back();
  }
  bool play() { return act(array_of<std::int64_t>({}, {newest()})); }

  grpc::Status finish() {
    stream_->WritesDone();
    return stream_->Finish();
  }

  rpcenv::Step step;

 private:
  grpc::ClientContext context_;
  std::unique_ptr<Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::Action, rpcenv::Step>> stream_;
};

// A learner that knows vector streams.
class VectorClient {
 public:
  explicit VectorClient(const std::string& address, std::uint64_t seed = 0,
                        const std::string& options = "")
      : stub_(stub_for(address)), stream_(stub_->StreamingVectorEnv(&context_)) {
    rpcenv::VectorAction message;
    message.set_seed(seed);
    message.set_env_options(options);
    stream_->Write(message);
  }

  bool read() { return stream_->Read(&step); }

  bool act(const Array& action, const std::string& options = "") {
    rpcenv::VectorAction message;
    message.set_env_options(options);
    codec::encode(ArrayNest(action), message.mutable_nest_action());
    return stream_->Write(message) && read();
  }

  std::vector<std::int32_t> frames() const {
    return values_of<std::int32_t>(
        codec::decode(step.observation()).as_map().at("frame").as_leaf());
  }

  bool play(const std::string& options = "") {
    const auto now = frames();
    Array action(DType::kInt64, {static_cast<std::int64_t>(now.size())});
    std::copy(now.begin(), now.end(), action.as<std::int64_t>());
    return act(action, options);
  }

  grpc::Status finish() {
    stream_->WritesDone();
    return stream_->Finish();
  }

  rpcenv::VectorStep step;

 private:
  grpc::ClientContext context_;
  std::unique_ptr<Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::VectorAction, rpcenv::VectorStep>> stream_;
};

rpcenv::Description describe(const std::string& address) {
  grpc::ClientContext context;
  rpcenv::Description description;
  EXPECT_TRUE(stub_for(address)->Describe(&context, {}, &description).ok());
  return description;
}

std::vector<bool> bools(const rpcenv::NDArray& array) {
  return values_of<bool>(codec::decode(array));
}

std::vector<std::int32_t> ints(const rpcenv::NDArray& array) {
  return values_of<std::int32_t>(codec::decode(array));
}

std::vector<float> floats(const rpcenv::NDArray& array) {
  return values_of<float>(codec::decode(array));
}

// ---- The original protocol -------------------------------------------------------------------

TEST(EnvServerTest, AnOriginalLearnerSeesTheOriginalsSteps) {
  TestFolder folder;
  // Environment 2: games of 5 steps; in the first a life is lost at step 2.
  RunningServer server(fake_env({.first = 2}), folder.address());
  OriginalClient client(folder.address());
  std::vector<bool> done;
  std::vector<int> steps;
  std::vector<float> rewards, returns;
  ASSERT_TRUE(client.read());
  for (int i = 0; i < 8; ++i) {
    done.push_back(client.step.done());
    steps.push_back(client.step.episode_step());
    rewards.push_back(client.step.reward());
    returns.push_back(client.step.episode_return());
    ASSERT_TRUE(client.play());
  }
  EXPECT_EQ(done, (std::vector<bool>{true, false, true, false, false, true, false, false}));
  EXPECT_EQ(steps, (std::vector<int>{0, 1, 2, 3, 4, 5, 1, 2})) << "of whole games, not of lives";
  EXPECT_EQ(rewards, (std::vector<float>{0, 3, 4, 5, 6, 7, 3, 4}));
  EXPECT_EQ(returns, (std::vector<float>{0, 3, 7, 12, 18, 25, 3, 7}));
  EXPECT_TRUE(client.finish().ok());
}

TEST(EnvServerTest, ADoneStepCarriesTheFirstObservationOfTheNextEpisode) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  OriginalClient client(folder.address());
  ASSERT_TRUE(client.read());
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(client.play());
  EXPECT_TRUE(client.step.done());
  EXPECT_EQ(client.newest(), 1'000) << "game 1, step 0";
}

TEST(EnvServerTest, AnOriginalLearnerSeesWholeStacks) {
  TestFolder folder;
  RunningServer server(fake_env({.frame_stack = 3}), folder.address());
  OriginalClient client(folder.address());
  ASSERT_TRUE(client.read() && client.play());
  EXPECT_EQ(values_of<std::int32_t>(
                codec::decode(client.step.observation()).as_map().at("frame").as_leaf()),
            (std::vector<std::int32_t>{0, 0, 1}));
}

TEST(EnvServerTest, EveryOriginalStreamHasASeedOfItsOwn) {
  TestFolder folder;
  std::vector<std::uint64_t> seeds;
  RunningServer server(fake_env({.on_reset = [&](std::uint64_t seed) { seeds.push_back(seed); }}),
                       folder.address());
  for (int i = 0; i < 2; ++i) {
    OriginalClient client(folder.address());
    ASSERT_TRUE(client.read());
    ASSERT_TRUE(client.finish().ok());
  }
  server.stop();
  ASSERT_EQ(seeds.size(), 2u);
  EXPECT_NE(seeds[0], seeds[1]);
}

TEST(EnvServerTest, AServerOfSeveralEnvironmentsToldApartRefusesAnOriginalLearner) {
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = 2}), folder.address());
  OriginalClient client(folder.address());
  EXPECT_FALSE(client.read());
  const grpc::Status status = client.finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_NE(status.error_message().find("this server steps 2 together"), std::string::npos);
}

TEST(EnvServerTest, AnActionMayHaveDimensionsOfTimeAndBatch) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  OriginalClient client(folder.address());
  ASSERT_TRUE(client.read());
  for (int t = 0; t < 3; ++t) {
    ASSERT_TRUE(client.act(array_of<std::int64_t>({1, 1}, {client.newest()})));
  }
  EXPECT_TRUE(client.finish().ok());
}

TEST(EnvServerTest, AnActionThatLosesDimensionsEndsTheStreamWithBothSides) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  OriginalClient client(folder.address());
  ASSERT_TRUE(client.read());
  ASSERT_TRUE(client.act(array_of<std::int64_t>({1, 1}, {client.newest()})));
  EXPECT_FALSE(client.act(array_of<std::int64_t>({1}, {client.newest()})));
  const grpc::Status status = client.finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "an action's shape must begin with [1, 1], got [1]");
}

// ---- Vector streams --------------------------------------------------------------------------

TEST(EnvServerTest, AVectorStreamTellsTheEndsOfEpisodesApart) {
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = 2}), folder.address());
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  EXPECT_EQ(bools(client.step.terminated()), (std::vector<bool>{true, true}));
  EXPECT_EQ(bools(client.step.episode_end()), (std::vector<bool>{false, false}));
  EXPECT_EQ(ints(client.step.episode_step()), (std::vector<std::int32_t>{0, 0}));

  ASSERT_TRUE(client.play() && client.play());  // both lose a life
  EXPECT_EQ(bools(client.step.terminated()), (std::vector<bool>{true, true}));
  EXPECT_EQ(bools(client.step.episode_end()), (std::vector<bool>{false, false}));
  EXPECT_EQ(ints(client.step.episode_step()), (std::vector<std::int32_t>{2, 2}));

  ASSERT_TRUE(client.play());  // environment 0 ends its first game, of 3 steps
  EXPECT_EQ(bools(client.step.terminated()), (std::vector<bool>{true, false}));
  EXPECT_EQ(bools(client.step.episode_end()), (std::vector<bool>{true, false}));
  EXPECT_EQ(floats(client.step.episode_return()), (std::vector<float>{6, 9}));
  EXPECT_FALSE(client.step.has_final_observation());

  ASSERT_TRUE(client.play() && client.play() && client.play());  // and its second, truncated
  EXPECT_EQ(bools(client.step.truncated()), (std::vector<bool>{true, false}));
  EXPECT_EQ(bools(client.step.terminated()), (std::vector<bool>{false, false}));
  EXPECT_EQ(client.frames(), (std::vector<std::int32_t>{2'000, 1'001'002}));
  EXPECT_EQ(values_of<std::int32_t>(
                codec::decode(client.step.final_observation()).as_map().at("frame").as_leaf()),
            (std::vector<std::int32_t>{1'003}));
  EXPECT_TRUE(client.finish().ok());
}

TEST(EnvServerTest, TheInfoComesWithTheStepsInWhichGamesEnd) {
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = 2, .num_keywords = 2}), folder.address());
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  EXPECT_FALSE(client.step.has_info());
  ASSERT_TRUE(client.play() && client.play());  // both lose a life, but the games go on
  EXPECT_FALSE(client.step.has_info());
  ASSERT_TRUE(client.play());  // environment 0 ends its first game, after 3 steps
  EXPECT_EQ(client.step.info().shape_size(), 2);
  EXPECT_EQ(floats(client.step.info()), (std::vector<float>{3, 3.5}));
  ASSERT_TRUE(client.play());  // environment 1, after 4
  EXPECT_EQ(floats(client.step.info()), (std::vector<float>{1'000'004, 1'000'004.5}));
  ASSERT_TRUE(client.play());
  EXPECT_FALSE(client.step.has_info());
  EXPECT_TRUE(client.finish().ok());
}

TEST(EnvServerTest, TheLearnersSeedReachesTheEnvironment) {
  TestFolder folder;
  std::atomic<std::uint64_t> got = 0;
  RunningServer server(fake_env({.on_reset = [&](std::uint64_t seed) { got = seed; }}),
                       folder.address());
  VectorClient client(folder.address(), (std::uint64_t{1} << 62) + 5);
  ASSERT_TRUE(client.read());
  EXPECT_EQ(got, (std::uint64_t{1} << 62) + 5);
  EXPECT_TRUE(client.finish().ok());
}

TEST(EnvServerTest, OptionsReachTheEnvironmentBeforeTheResetOrStepOfTheirMessage) {
  TestFolder folder;
  std::vector<std::string> events;  // of the stream's thread, which is idle while it is read
  RunningServer server(
      fake_env({.on_reset = [&](std::uint64_t) { events.push_back("reset"); },
                .on_options = [&](const std::string& json) { events.push_back(json); },
                .on_step = [&](int) { events.push_back("step"); }}),
      folder.address());
  VectorClient client(folder.address(), 1, R"({"level": 1})");
  ASSERT_TRUE(client.read());
  ASSERT_TRUE(client.play());
  ASSERT_TRUE(client.play(R"({"level": 2})"));
  const std::vector<std::string> expected = {R"({"level": 1})", "reset", "step", R"({"level": 2})",
                                             "step"};
  EXPECT_EQ(events, expected);
}

TEST(EnvServerTest, ActionsForTheWrongNumberOfEnvironmentsAreRefused) {
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = 2}), folder.address());
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  EXPECT_FALSE(client.act(array_of<std::int64_t>({3}, {0, 0, 0})));
  const grpc::Status status = client.finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "an action's shape must begin with [2], got [3]");
}

TEST(EnvServerTest, StepsLargerThanGrpcsDefaultOfFourMebibytesPass) {
  class Large final : public Env {
   public:
    std::int64_t num_envs() const override { return 1; }
    std::int64_t frame_stack() const override { return 1; }
    std::string action_space() const override { return ""; }
    void set_options(const std::string&) override {}
    ArrayNest reset(std::uint64_t) override { return Array::zeros(DType::kUInt8, {1, 8 << 20}); }
    EnvStep step(const ArrayNest&) override { throw EnvironmentFailure("not stepped here"); }
  };
  TestFolder folder;
  RunningServer server([] { return std::make_unique<Large>(); }, folder.address());
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  EXPECT_EQ(client.step.observation().array().data().size(), std::size_t{8} << 20);
}

TEST(EnvServerTest, AnExceptionOfTheEnvironmentEndsItsStreamOnly) {
  TestFolder folder;
  std::atomic<bool> fail = false;
  RunningServer server(fake_env({.on_step =
                                     [&](int) {
                                       if (fail) throw EnvironmentFailure("Traceback: ouch");
                                     }}),
                       folder.address());
  VectorClient failing(folder.address()), healthy(folder.address());
  ASSERT_TRUE(failing.read() && healthy.read());
  fail = true;
  EXPECT_FALSE(failing.play());
  const grpc::Status status = failing.finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INTERNAL);
  EXPECT_EQ(status.error_message(), "Traceback: ouch");
  fail = false;
  EXPECT_TRUE(healthy.play());
  EXPECT_TRUE(healthy.finish().ok());
}

TEST(EnvServerTest, OfALongTracebackTheEndArrivesInWholeCharacters) {
  TestFolder folder;
  std::string text;
  for (int i = 0; i < 5'000; ++i) text += "\xc3\xa9";  // é
  RunningServer server(
      fake_env({.on_reset = [&](std::uint64_t) { throw EnvironmentFailure(text + "the end!"); }}),
      folder.address());
  const auto stub = stub_for(folder.address());
  grpc::ClientContext context;
  rpcenv::Description description;
  const std::string message = stub->Describe(&context, {}, &description).error_message();
  EXPECT_TRUE(message.starts_with("... \xc3\xa9")) << message.substr(0, 20);
  EXPECT_TRUE(message.ends_with("the end!"));
  EXPECT_LE(3 * message.size(), 4'000u + 3 * 12) << "each byte of an é takes three of the header";
  EXPECT_GT(3 * message.size(), 3'900u);
}

// What this process prints on stderr while the object lives.
class Stderr {
 public:
  Stderr() : before_(::dup(STDERR_FILENO)) {
    if (::pipe(ends_) != 0) throw std::runtime_error("no pipe");
    ::dup2(ends_[1], STDERR_FILENO);
  }
  ~Stderr() {
    ::dup2(before_, STDERR_FILENO);
    for (const int descriptor : {before_, ends_[0], ends_[1]}) ::close(descriptor);
  }
  Stderr(const Stderr&) = delete;
  Stderr& operator=(const Stderr&) = delete;

  // Waits for a line and returns it.
  std::string line() {
    Background<std::string> reader([&] {
      std::string text;
      for (char next = 0; next != '\n' && ::read(ends_[0], &next, 1) == 1;) text += next;
      return text;
    });
    return reader.get();
  }

 private:
  const int before_;
  int ends_[2];
};

TEST(EnvServerTest, AFailureIsPrintedIfTheEnvironmentThenHangs) {
  TestFolder folder;
  testing::Hanging hanging;
  RunningServer server(
      fake_env({.on_step = [](int) { throw EnvironmentFailure("Traceback: ouch"); },
                .on_destruction = [&] { hanging.here(); }}),
      folder.address(),
      {.description = EnvDescription{}, .close_grace = std::chrono::milliseconds(1)});
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  Stderr printed;
  Background<bool> learner([&] { return client.play(); });
  EXPECT_EQ(printed.line(),
            "an environment has failed, and may hang while it is closed: Traceback: ouch\n");
  hanging.go_on.notify();
  EXPECT_FALSE(learner.get());
  EXPECT_EQ(client.finish().error_message(), "Traceback: ouch");
}

TEST(EnvServerTest, AnEnvironmentLivesAsLongAsItsStream) {
  TestFolder folder;
  Notification destroyed;
  RunningServer server(fake_env({.on_destruction = [&] { destroyed.notify(); }}), folder.address());
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  EXPECT_FALSE(destroyed.happened());
  EXPECT_TRUE(client.finish().ok());
  destroyed.wait();
}

// ---- Describe --------------------------------------------------------------------------------

TEST(EnvServerTest, ADescriptionIsMadeFromAnEnvironmentOnce) {
  TestFolder folder;
  std::atomic<int> resets = 0;
  RunningServer server(
      fake_env({.num_envs = 3, .frame_stack = 4, .on_reset = [&](std::uint64_t) { ++resets; }}),
      folder.address(), {.env_id = "Fake-v0", .num_streams = 2});
  const auto first = describe(folder.address()), second = describe(folder.address());
  EXPECT_EQ(first.SerializeAsString(), second.SerializeAsString());
  EXPECT_EQ(resets, 1);
  EXPECT_EQ(first.protocol_version(), 1);
  EXPECT_EQ(first.env_id(), "Fake-v0");
  EXPECT_EQ(first.num_envs(), 3);
  EXPECT_EQ(first.num_streams(), 2);
  EXPECT_EQ(first.frame_stack(), 4);
  EXPECT_EQ(first.action_space(), R"({"type": "Discrete", "n": 2})");
  const Array frame = codec::decode_spec(first.observation()).as_map().at("frame").as_leaf();
  EXPECT_EQ(frame.dtype(), DType::kInt32);
  EXPECT_EQ(frame.shape(), Shape{1});
}

TEST(EnvServerTest, ADescriptionThatWasGivenNeedsNoEnvironment) {
  TestFolder folder;
  const EnvDescription description{.env_id = "given",
                                   .num_envs = 5,
                                   .observation = ArrayNest(Array::spec(DType::kUInt8, {2})),
                                   .info_keywords = {"score", "laps"}};
  RunningServer server([]() -> std::unique_ptr<Env> { throw EnvironmentFailure("none here"); },
                       folder.address(), {.description = description});
  EXPECT_EQ(describe(folder.address()).env_id(), "given");
  EXPECT_EQ(describe(folder.address()).num_envs(), 5);
  EXPECT_EQ(describe(folder.address()).info_keywords(1), "laps");
}

// ---- Starting and ending ---------------------------------------------------------------------

TEST(EnvServerTest, ASecondRunIsAnError) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  EXPECT_EQ(message_of<std::runtime_error>([&] { server.server().run(); }),
            "Server already running");
}

TEST(EnvServerTest, StoppingAServerThatDoesNotRunIsAnError) {
  TestFolder folder;
  EnvServer server(fake_env(), folder.address(), {});
  EXPECT_EQ(message_of<std::runtime_error>([&] { server.stop(); }), "Server not running");
}

TEST(EnvServerTest, StopEndsAServerWhoseClientIsThinking) {
  TestFolder folder;
  Notification destroyed;
  RunningServer server(fake_env({.on_destruction = [&] { destroyed.notify(); }}), folder.address());
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  server.stop();
  EXPECT_TRUE(destroyed.happened()) << "stop() returns when the environments are gone";
  EXPECT_FALSE(client.play());
  EXPECT_FALSE(client.finish().ok());
}

TEST(EnvServerTest, StopWaitsForAStepThatTheEnvironmentIsInTheMiddleOf) {
  TestFolder folder;
  Notification stepping, go_on;
  std::atomic<bool> stepped = false;
  RunningServer server(fake_env({.on_step =
                                     [&](int) {
                                       stepping.notify();
                                       go_on.wait();
                                       stepped = true;
                                     }}),
                       folder.address(), {.stop_grace = std::chrono::milliseconds(1)});
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  Background<bool> learner([&] { return client.play(); });
  stepping.wait();
  Background<bool> stopping([&] {
    server.stop();
    return stepped.load();
  });
  EXPECT_FALSE(learner.get()) << "the client is not kept waiting";
  go_on.notify();
  EXPECT_TRUE(stopping.get());
  EXPECT_FALSE(client.finish().ok());
}

TEST(EnvServerTest, AnEnvironmentThatHangsIsLeftBehindWhenTheServerStops) {
  using namespace std::chrono_literals;
  TestFolder folder;
  testing::Hanging hanging;
  Notification destroyed;
  auto server = std::make_unique<EnvServer>(
      fake_env(
          {.on_step = [&](int) { hanging.here(); }, .on_destruction = [&] { destroyed.notify(); }}),
      folder.address(),
      EnvServerOptions{.description = EnvDescription{}, .stop_grace = 1ms, .step_grace = 20ms});
  Background<void> run([&] { server->run(); });
  ASSERT_TRUE(server->wait_until_serving(testing::kPatience));
  VectorClient client(folder.address());
  ASSERT_TRUE(client.read());
  Background<bool> learner([&] { return client.play(); });
  hanging.reached.wait();
  EXPECT_EQ(message_of<TimeoutError>([&] { server->stop(); }),
            "environment server at " + folder.address() +
                ": an environment was still in a step 20 ms after stop(); its thread is left "
                "behind until the step returns");
  run.get();
  EXPECT_FALSE(learner.get()) << "the client is not kept waiting";
  server.reset();
  RunningServer next(fake_env(), folder.address());
  VectorClient next_client(folder.address());
  EXPECT_TRUE(next_client.read() && next_client.play()) << "the address is free";
  EXPECT_FALSE(destroyed.happened());
  hanging.go_on.notify();
  destroyed.wait();
}

TEST(EnvServerTest, AStopAfterOneThatLeftAnEnvironmentBehindIsLikeAnyOther) {
  using namespace std::chrono_literals;
  TestFolder folder;
  testing::Hanging hanging;
  std::atomic<int> destroyed = 0;
  EnvServer server(
      fake_env({.on_step = [&](int) { hanging.here(); }, .on_destruction = [&] { ++destroyed; }}),
      folder.address(), {.description = EnvDescription{}, .step_grace = 2s});
  for (const bool hangs : {true, false}) {
    Background<void> run([&] { server.run(); });
    ASSERT_TRUE(server.wait_until_serving(testing::kPatience));
    VectorClient client(folder.address());
    ASSERT_TRUE(client.read());
    if (hangs) {
      Background<bool> learner([&] { return client.play(); });
      hanging.reached.wait();
      EXPECT_THROW(server.stop(), TimeoutError);
      learner.get();
    } else {
      EXPECT_NO_THROW(server.stop());
    }
    run.get();
  }
  hanging.go_on.notify();
  testing::until([&] { return destroyed == 2; }, "the end of both environments");
}

TEST(EnvServerTest, AServerCanServeAgainAtTheSameAddress) {
  TestFolder folder;
  for (int i = 0; i < 3; ++i) {
    RunningServer server(fake_env(), folder.address());
    VectorClient client(folder.address());
    ASSERT_TRUE(client.read());
    EXPECT_TRUE(client.finish().ok());
  }
}

TEST(EnvServerTest, AnAddressThatIsServedAlreadyIsNotStolen) {
  TestFolder folder;
  RunningServer first(fake_env(), folder.address());
  EnvServer second(fake_env(), folder.address(), {});
  EXPECT_EQ(message_of<ConnectionError>([&] { second.run(); }),
            "cannot serve at " + folder.address() + ": process " + std::to_string(::getpid()) +
                " serves it; stop that one or choose another address");
  VectorClient client(folder.address());
  EXPECT_TRUE(client.read()) << "the first still serves";
}

TEST(EnvServerTest, ASocketThatNobodyServesAnyMoreIsTakenOver) {
  TestFolder folder;
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  (folder.path() / "0").string().copy(name.sun_path, sizeof(name.sun_path) - 1);
  ASSERT_EQ(::bind(descriptor, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  ::close(descriptor);
  RunningServer server(fake_env(), folder.address());
  VectorClient client(folder.address());
  EXPECT_TRUE(client.read());
}

TEST(EnvServerTest, AddressesThatCannotBeBoundAreRefusedByName) {
  TestFolder folder;
  std::ofstream(folder.path() / "file") << "precious";
  const std::string unix_path = "unix:" + folder.path().string();
  for (const std::string& address :
       {unix_path + "/missing/0", unix_path + "/file", unix_path + "/" + std::string(200, 'x'),
        std::string("localhost:notaport"), std::string("256.256.256.256:1")}) {
    EnvServer server(fake_env(), address, {});
    EXPECT_TRUE(message_of<ConnectionError>([&] {
                  server.run();
                }).starts_with("cannot serve at " + address + ": "));
    EXPECT_FALSE(server.wait_until_serving(std::chrono::milliseconds(0)));
  }
  EXPECT_TRUE(std::filesystem::is_regular_file(folder.path() / "file"));
}

#ifdef __linux__  // elsewhere a full queue refuses, as nobody does who listens no more
TEST(EnvServerTest, AServerWhoseQueueOfConnectionsIsFullIsNotWaitedFor) {
  TestFolder folder;
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  (folder.path() / "0").string().copy(name.sun_path, sizeof(name.sun_path) - 1);
  const auto* address = reinterpret_cast<const sockaddr*>(&name);
  std::vector<int> descriptors{::socket(AF_UNIX, SOCK_STREAM, 0)};
  ASSERT_EQ(::bind(descriptors[0], address, sizeof(name)), 0);
  ASSERT_EQ(::listen(descriptors[0], 0), 0);
  int result = 0;
  while (result == 0 && descriptors.size() < 100) {
    descriptors.push_back(::socket(AF_UNIX, SOCK_STREAM, 0));
    ::fcntl(descriptors.back(), F_SETFL, O_NONBLOCK);
    result = ::connect(descriptors.back(), address, sizeof(name));
  }
  EXPECT_EQ(result, -1) << "the queue is full";
  EnvServer server(fake_env(), folder.address(), {});
  Background<std::string> run([&] { return message_of<ConnectionError>([&] { server.run(); }); });
  EXPECT_EQ(run.get(), "cannot serve at " + folder.address() +
                           ": another process serves it; stop that one or choose another address");
  for (const int descriptor : descriptors) ::close(descriptor);
}
#endif

TEST(EnvServerTest, TheThreadThatRunsMayStopTheServerFromPoll) {
  TestFolder folder;
  EnvServer server(fake_env(), folder.address(), {});
  Background<void> run([&] { server.run([&] { server.stop(); }); });
  run.get();
  EXPECT_EQ(message_of<std::runtime_error>([&] { server.stop(); }), "Server not running");
}

TEST(EnvServerTest, StopWaitsForTheRunThatItEndsAndForNoOther) {
  TestFolder folder;
  EnvServer server(fake_env(), folder.address(), {});
  for (int i = 0; i < 5; ++i) {
    Background<void> runs([&] {
      server.run();
      server.run();
    });
    for (int run = 0; run < 2; ++run) {
      ASSERT_TRUE(server.wait_until_serving(testing::kPatience));
      Background<void> stopping([&] { server.stop(); });
      stopping.get();
    }
    runs.get();
  }
}

TEST(EnvServerTest, WhatPollThrowsEndsTheServer) {
  TestFolder folder;
  EnvServer server(fake_env(), folder.address(), {});
  EXPECT_EQ(message_of<std::runtime_error>(
                [&] { server.run([] { throw std::runtime_error("Ctrl-C"); }); }),
            "Ctrl-C");
  RunningServer next(fake_env(), folder.address());
}

}  // namespace
}  // namespace torchbeast
