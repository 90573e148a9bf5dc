// SPDX-License-Identifier: Apache-2.0
//
// The whole core at work: servers, streams, inference, rollouts. Every row is compared with the
// games played alone, and every ending is tried while something waits.

#include "libtorchbeast/acting/actor_pool.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/server/door.h"
#include "libtorchbeast/server/host.h"
#include "libtorchbeast/testing/fake_env.h"
#include "libtorchbeast/testing/servers.h"
#include "libtorchbeast/testing/threads.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using namespace std::chrono_literals;
using testing::array_of;
using testing::Background;
using testing::fake_env;
using testing::FakeEnvOptions;
using testing::FakeGame;
using testing::GameStep;
using testing::Hanging;
using testing::kPatience;
using testing::message_of;
using testing::Notification;
using testing::RunningServer;
using testing::same_bytes;
using testing::TestFolder;
using testing::tuple;
using testing::until;
using testing::values_of;

// The policy of the tests: ((action, trace), state + 1). The action is each environment's newest
// frame, as FakeGames demand. trace, float32 [1, B, 2]: the state and version that computed it.
ArrayNest policy(const ArrayNest& inputs, std::int64_t version) {
  const Array frame =
      inputs.as_vector()[0].as_vector()[0].as_map().at("frame").as_leaf();  // [1, B, k]
  const Array state = inputs.as_vector()[1].as_leaf();                      // [1, B, 1]
  const std::int64_t batch = frame.size(1), stacked = frame.size(2);
  Array action(DType::kInt64, {1, batch}), trace(DType::kFloat32, {1, batch, 2});
  Array next(DType::kFloat32, {1, batch, 1});
  for (std::int64_t b = 0; b < batch; ++b) {
    action.as<std::int64_t>()[b] = frame.as<std::int32_t>()[(b + 1) * stacked - 1];
    trace.as<float>()[2 * b] = state.as<float>()[b];
    trace.as<float>()[2 * b + 1] = static_cast<float>(version);
    next.as<float>()[b] = state.as<float>()[b] + 1;
  }
  return tuple({tuple({action, trace}), next});
}

using Policy = std::function<ArrayNest(const ArrayNest& inputs, std::int64_t version)>;

ActorPoolOptions options_for(std::vector<Endpoint> endpoints, std::int64_t unroll_length = 3) {
  return {.unroll_length = unroll_length,
          .endpoints = std::move(endpoints),
          .step_timeout = kPatience,
          .retries = {.connect_timeout = kPatience, .reconnect_timeout = kPatience}};
}

// A pool with its queue, its batcher and an inference thread.
class Play {
 public:
  explicit Play(ActorPoolOptions options, Policy answer = policy, BatchingQueueOptions batches = {})
      : batcher_(std::make_shared<DynamicBatcher>(DynamicBatcherOptions{.queue = batches})),
        pool_(std::move(options), queue_, batcher_,
              ArrayNest(Array::zeros(DType::kFloat32, {1, 1, 1}))),
        inference_([this, answer = std::move(answer)] { infer(answer); }),
        run_([this] { pool_.run([] {}, [this](const std::string& text) { note(text); }); }) {}

  ~Play() {
    batcher_->try_close();
    queue_->try_close();
    try {
      if (!ended_) end();
    } catch (const std::exception&) {  // a test that wants to know calls failure()
    }
    inference_.get();
  }

  // Waits for the end of run(); throws what it threw.
  void end() {
    ended_ = true;
    run_.get();
  }

  template <typename Expected>
  std::string failure() {
    return message_of<Expected>([this] { end(); });
  }

  // The next rollouts, one item each.
  std::vector<QueueItem> take(std::size_t count) {
    std::vector<QueueItem> items;
    while (items.size() < count) {
      auto item = queue_->dequeue();
      if (!item) throw std::logic_error("the queue closed before a test had its rollouts");
      items.push_back(std::move(*item));
    }
    return items;
  }

  // What run() has reported.
  std::vector<std::string> reports() EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return reports_;
  }

  RolloutQueue& queue() { return *queue_; }
  DynamicBatcher& batcher() { return *batcher_; }
  ActorPool& pool() { return pool_; }

 private:
  void note(const std::string& text) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    reports_.push_back(text);
  }

  void infer(const Policy& answer) {
    std::int64_t version = 0;
    while (const auto batch = batcher_->next()) {
      batch->set_outputs(answer(batch->get_inputs(), version), version);
      ++version;
    }
  }

  const std::shared_ptr<RolloutQueue> queue_ = std::make_shared<RolloutQueue>(
      RolloutQueueOptions{.queue = {.maximum_batch_size = 1, .maximum_queue_size = 4}});
  const std::shared_ptr<DynamicBatcher> batcher_;
  Mutex mutex_;
  std::vector<std::string> reports_ GUARDED_BY(mutex_);
  ActorPool pool_;
  Background<void> inference_;
  Background<void> run_;
  bool ended_ = false;
};

// ---- What stands in a rollout ----------------------------------------------------------------

// Row n of one environment's life, as the definition of rollouts says. Frames are stacks of two.
struct Row {
  std::int32_t older_frame, frame;
  float reward, episode_return;
  std::int32_t episode_step;
  bool terminated, truncated, episode_end;
  std::int64_t action;  // that led here
  std::vector<std::int32_t> final_frames;
};

// The first `count` rows that environment `env` gives when it is played alone.
std::vector<Row> rows_of(int env, std::size_t count) {
  FakeGame game(env);
  const std::int32_t first = game.observation();
  std::vector<Row> rows{{first, first, 0, 0, 0, true, false, false, 0, {}}};
  std::int32_t steps = 0;
  float sum = 0;
  while (rows.size() < count) {
    const std::int32_t before = game.observation();
    const GameStep step = game.step(before);
    const bool done = step.terminated || step.truncated;
    sum += step.reward;
    rows.push_back({done ? step.observation : before,
                    step.observation,
                    step.reward,
                    sum,
                    ++steps,
                    step.terminated,
                    step.truncated,
                    step.episode_end,
                    before,
                    {}});
    if (step.truncated) rows.back().final_frames = {before, step.last_observation};
    if (step.episode_end) steps = 0, sum = 0;
  }
  return rows;
}

// [1, K, 2]
Array final_frames(const QueueItem& item) {
  return item.info.as_map().at("final_observation").as_map().at("frame").as_leaf();
}

// Compares column c of an item with the rows of its environment, which was made when its stream's
// rollout `first` began. Returns the rollout's number from there on.
std::int64_t check_column(const QueueItem& item, std::int64_t c, int env, std::size_t* next_final,
                          std::int64_t first = 0) {
  const auto& rollout = item.data.as_vector()[0].as_vector();
  const auto& outputs = rollout[0].as_vector();
  const Array frame = outputs[0].as_map().at("frame").as_leaf();  // [T + 1, columns, 2]
  const std::int64_t length = frame.size(0) - 1, columns = frame.size(1);
  const auto beside = [&](const char* key) { return item.info.as_map().at(key).as_leaf(); };
  const std::int64_t number = beside("rollout").as<std::int64_t>()[c] - first;
  const Array finals = final_frames(item);
  const auto expected = rows_of(env, static_cast<std::size_t>((number + 1) * length + 1));
  for (std::int64_t t = 0; t <= length; ++t) {
    const Row& row = expected[static_cast<std::size_t>(number * length + t)];
    const std::int64_t i = t * columns + c;
    EXPECT_EQ(frame.as<std::int32_t>()[2 * i], row.older_frame);
    EXPECT_EQ(frame.as<std::int32_t>()[2 * i + 1], row.frame);
    EXPECT_EQ(outputs[1].as_leaf().as<float>()[i], row.reward);
    EXPECT_EQ(outputs[2].as_leaf().as<bool>()[i], row.terminated || row.truncated);
    EXPECT_EQ(outputs[3].as_leaf().as<std::int32_t>()[i], row.episode_step);
    EXPECT_EQ(outputs[4].as_leaf().as<float>()[i], row.episode_return);
    EXPECT_EQ(beside("terminated").as<bool>()[i], row.terminated);
    EXPECT_EQ(beside("truncated").as<bool>()[i], row.truncated);
    EXPECT_EQ(beside("episode_end").as<bool>()[i], row.episode_end);
    EXPECT_EQ(rollout[1].as_vector()[0].as_leaf().as<std::int64_t>()[i], row.action);
    const float* trace = rollout[1].as_vector()[1].as_leaf().as<float>() + 2 * i;
    if (number + t == 0) {
      EXPECT_EQ(trace[1], 0) << "no computation led to the very first row";
    } else {
      EXPECT_EQ(trace[0], static_cast<float>(number * length + t - 1));
      EXPECT_EQ(trace[1], static_cast<float>(beside("policy_version").as<std::int64_t>()[i]));
    }
    if (t == 0 || !row.truncated) continue;
    const std::int32_t* final_frame = finals.as<std::int32_t>() + 2 * (*next_final)++;
    EXPECT_EQ(std::vector<std::int32_t>(final_frame, final_frame + 2), row.final_frames);
  }
  EXPECT_EQ(item.data.as_vector()[1].as_leaf().as<float>()[c], static_cast<float>(number * length))
      << "the state is the one with which row 0 is processed";
  return number;
}

TEST(ActorPoolTest, RolloutsAreTheGamesPlayedAlone) {
  constexpr int kEnvs = 3;
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = kEnvs, .frame_stack = 2}), folder.address());
  Play play(options_for({folder.address()}, 4));
  std::int64_t number = 0, finals = 0;
  for (const QueueItem& item : play.take(10)) {
    std::size_t next_final = 0;
    for (int e = 0; e < kEnvs; ++e) EXPECT_EQ(check_column(item, e, e, &next_final), number);
    EXPECT_EQ(final_frames(item).size(1), static_cast<std::int64_t>(next_final));
    finals += final_frames(item).size(1);
    ++number;
  }
  EXPECT_GT(finals, 5);
}

TEST(ActorPoolTest, ColumnsOfSeveralStreamsAreTheGamesPlayedAlone) {
  constexpr int kEnvs = 4, kColumns = 2;
  TestFolder folder;
  RunningServer first(fake_env({.num_envs = kEnvs, .frame_stack = 2}), folder.address(0));
  RunningServer second(fake_env({.num_envs = kEnvs, .frame_stack = 2, .first = 50}),
                       folder.address(1));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.rollout_columns = kColumns;
  Play play(options);
  std::map<std::int64_t, std::int64_t> rollouts;  // of each environment
  for (const QueueItem& item : play.take(40)) {
    const Array streams = item.info.as_map().at("stream").as_leaf();
    ASSERT_EQ(streams.shape(), (Shape{1, kColumns}));
    std::size_t next_final = 0;
    for (std::int64_t c = 0; c < kColumns; ++c) {
      const std::int64_t stream = streams.as<std::int64_t>()[c];
      const std::int64_t server = stream / kMaxEnvsPerStream, e = stream % kMaxEnvsPerStream;
      const auto env = static_cast<int>(50 * server + e);
      EXPECT_EQ(check_column(item, c, env, &next_final), rollouts[stream]++);
    }
    EXPECT_EQ(final_frames(item).size(1), static_cast<std::int64_t>(next_final));
  }
  EXPECT_EQ(rollouts.size(), 2u * kEnvs);
}

TEST(ActorPoolTest, TheInfoOfAGameStandsInTheRowOfItsFinalReturn) {
  constexpr int kEnvs = 3;
  constexpr std::size_t kRollouts = 10, kLength = 4;
  TestFolder folder;
  const EnvDescription description{
      .num_envs = kEnvs,
      .observation =
          ArrayNest(ArrayNest::Map{{"frame", ArrayNest(Array::spec(DType::kInt32, {1}))}}),
      .info_keywords = {"whole", "half"}};
  RunningServer server(fake_env({.num_envs = kEnvs, .num_keywords = 2}), folder.address(),
                       {.description = description});
  Play play(options_for({folder.address()}, kLength));
  const auto items = play.take(kRollouts);
  int games = 0;
  for (int e = 0; e < kEnvs; ++e) {
    FakeGame game(e);
    float sum = 0;
    for (std::size_t n = 0; n < kRollouts * kLength; ++n) {
      const GameStep step = game.step(game.observation());
      sum += step.reward;
      const QueueItem& item = items[n / kLength];
      const std::size_t i = (n % kLength + 1) * kEnvs + static_cast<std::size_t>(e);
      const auto& outputs = item.data.as_vector()[0].as_vector()[0].as_vector();
      const auto& info = item.info.as_map().at("info").as_map();
      const float whole = info.at("whole").as_leaf().as<float>()[i];
      const float half = info.at("half").as_leaf().as<float>()[i];
      EXPECT_EQ(outputs[4].as_leaf().as<float>()[i], sum);
      if (!step.episode_end) {
        EXPECT_TRUE(std::isnan(whole) && std::isnan(half)) << "no game ended here";
        continue;
      }
      EXPECT_EQ(whole, testing::number_of(step, 0));
      EXPECT_EQ(half, testing::number_of(step, 1));
      sum = 0;
      ++games;
    }
  }
  EXPECT_GT(games, 20);
}

TEST(ActorPoolTest, RowZeroRepeatsTheLastRowOfTheRolloutBefore) {
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = 2}), folder.address());
  Play play(options_for({folder.address()}));
  const auto items = play.take(5);
  int compared = 0;
  for (std::size_t k = 0; k + 1 < items.size(); ++k) {
    nest::for_each2(
        [&](const Array& before, const Array& after) {
          EXPECT_TRUE(same_bytes(before.rows(3, 1), after.rows(0, 1)));
          ++compared;
        },
        items[k].data.as_vector()[0], items[k + 1].data.as_vector()[0]);
  }
  EXPECT_EQ(compared, 4 * 7);
}

TEST(ActorPoolTest, StepsAreCountedWhenTheirRolloutIsHandedOver) {
  TestFolder folder;
  RunningServer server(fake_env({.num_envs = 2}), folder.address());
  Play play(options_for({folder.address()}));
  EXPECT_EQ(play.pool().count() % 6, 0);
  play.take(5);
  until([&] { return play.pool().count() >= 5 * 3 * 2; }, "five rollouts being counted");
  EXPECT_EQ(play.pool().count() % 6, 0);
  EXPECT_EQ(play.pool().live_streams(), 1);
}

TEST(ActorPoolTest, AServerOfTheOriginalProtocolIsPlayed) {
  TestFolder folder;
  testing::ScriptedServer server(
      {.original_stream =
           [](testing::OriginalCall* stream) {
             FakeGame game(0);
             rpcenv::Step step;
             rpcenv::Action action;
             step.set_done(true);
             do {
               codec::encode(ArrayNest(ArrayNest::Map{
                                 {"frame", array_of<std::int32_t>({1}, {game.observation()})}}),
                             step.mutable_observation());
               if (!stream->Write(step) || !stream->Read(&action)) return grpc::Status::OK;
               const GameStep result =
                   game.step(codec::decode(action.nest_action()).as_leaf().as<std::int64_t>()[0]);
               step.set_done(result.episode_end);
               step.set_reward(result.reward);
             } while (true);
           }},
      folder.address());
  Play play(options_for({folder.address()}));
  const auto items = play.take(2);
  const Array frame =
      items[1].data.as_vector()[0].as_vector()[0].as_vector()[0].as_map().at("frame").as_leaf();
  EXPECT_EQ(values_of<std::int32_t>(frame), (std::vector<std::int32_t>{1000, 1001, 1002, 2000}));
}

TEST(ActorPoolTest, BatchesAreHeldBackForHalfOfTheStreams) {
  TestFolder folder;
  RunningServer server(fake_env({.frame_stack = 2}), folder.address());
  std::atomic<bool> all_live = false;
  std::atomic<int> batches = 0, small = 0;
  int since_all_live = 0;  // the first may have begun before
  Play play(options_for(std::vector<Endpoint>(4, folder.address()), 1),
            [&](const ArrayNest& inputs, std::int64_t version) {
              if (all_live && since_all_live++ > 0) {
                ++batches;
                if (nest::front(inputs).size(1) < 2) ++small;
              }
              return policy(inputs, version);
            },
            {.moment = std::chrono::hours(1)});
  until([&] { return play.pool().live_streams() == 4; }, "all streams");
  all_live = true;
  while (batches < 20) play.take(1);
  EXPECT_EQ(small, 0);
}

// ---- Seeds -----------------------------------------------------------------------------------

// The seeds that a pool gives its streams.
std::set<std::uint64_t> seeds_of(std::uint64_t pool_seed, int streams) {
  TestFolder folder;
  Mutex mutex;
  std::set<std::uint64_t> seeds;
  const EnvDescription description{
      .observation = ArrayNest(ArrayNest::Map{{"frame", Array::spec(DType::kInt32, {1})}})};
  RunningServer server(fake_env({.on_reset =
                                     [&](std::uint64_t seed) {
                                       MutexLock lock(mutex);
                                       seeds.insert(seed);
                                     }}),
                       folder.address(), {.description = description});
  ActorPoolOptions options =
      options_for(std::vector<Endpoint>(static_cast<std::size_t>(streams), folder.address()));
  options.seed = pool_seed;
  Play play(options);
  until([&] { return play.pool().live_streams() == streams; }, "every stream being live");
  MutexLock lock(mutex);
  return seeds;
}

TEST(ActorPoolTest, EveryStreamHasASeedOfItsOwnThatThePoolsSeedDecides) {
  const auto seeds = seeds_of(1, 3);
  EXPECT_EQ(seeds.size(), 3u);
  EXPECT_EQ(seeds_of(1, 3), seeds);
  const auto others = seeds_of(2, 3);
  for (const std::uint64_t seed : seeds) EXPECT_FALSE(others.contains(seed));
}

// ---- What time is spent on -------------------------------------------------------------------

TEST(ActorPoolTest, TimeIsAddedUpWhereEachStreamIs) {
  TestFolder folder;
  Hanging hanging;
  RunningServer server(fake_env(), folder.address(0));
  RunningServer stuck(fake_env({.on_step = [&](int) { hanging.here(); }}), folder.address(1));
  Play play(options_for({folder.address(0), folder.address(1)}));
  hanging.reached.wait();
  // The queue has room for four rollouts of three steps. From here on the first stream hands over
  // its fifth, which waits for room, and the second waits for its environment.
  until([&] { return play.pool().steps() == 5 * 3; }, "the last step before the queue is full");
  const StageTimes before = play.pool().times();
  const auto began = Clock::now();
  until([&] { return play.pool().times().queueing - before.queueing > 20ms; }, "more of that");
  const StageTimes after = play.pool().times();
  const auto passed = Clock::now() - began;
  EXPECT_EQ(after.inference, before.inference) << "nobody asks for actions";
  EXPECT_GT(after.environment - before.environment, 20ms - 1ms);
  EXPECT_LE(after.queueing - before.queueing, passed + 1ms) << "one stream only waits";
  hanging.go_on.notify();
  play.queue().close();
  play.end();
  const StageTimes end = play.pool().times();
  EXPECT_GE(end.queueing, after.queueing) << "what a stream spent counts after its end";
  EXPECT_EQ(play.pool().times().environment, end.environment) << "no stream runs any more";
  EXPECT_EQ(play.pool().times().queueing, end.queueing);
}

TEST(ActorPoolTest, WaitingForAnAnswerCountsAsInference) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
  const auto batcher = std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
  ActorPool pool(options_for({folder.address()}), queue, batcher, ArrayNest());
  EXPECT_EQ(pool.times().environment, 0ns) << "nothing has begun";
  Background<void> run([&] { pool.run(); });
  until([&] { return batcher->size() == 1; }, "an actor asking");
  const StageTimes before = pool.times();
  until([&] { return pool.times().inference > before.inference + 10ms; }, "time passing");
  EXPECT_EQ(pool.times().environment, before.environment);
  EXPECT_GT(before.environment, 0ns) << "it had to connect";
  batcher->close();
  run.get();
}

// ---- Orderly endings, each while something waits ---------------------------------------------

TEST(ActorPoolTest, ClosingTheQueueEndsRunWhileAnActorWaitsForRoom) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  Play play(options_for({folder.address()}));
  until([&] { return play.queue().size() == 4; }, "a full queue");
  play.queue().close();
  play.end();
  EXPECT_TRUE(play.batcher().is_closed());
}

TEST(ActorPoolTest, ClosingTheBatcherEndsRunWhileActorsPlay) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  Play play(options_for({folder.address(), folder.address()}));
  play.take(1);
  play.batcher().close();
  play.end();
  EXPECT_TRUE(play.queue().is_closed());
  EXPECT_EQ(play.pool().live_streams(), 0);
}

TEST(ActorPoolTest, ClosingEndsRunWhileAnActorWaitsForAnAnswer) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
  const auto batcher = std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
  ActorPool pool(options_for({folder.address()}), queue, batcher, ArrayNest());
  Background<void> run([&] { pool.run(); });
  until([&] { return batcher->size() == 1; }, "an actor asking");
  queue->close();
  run.get();
}

TEST(ActorPoolTest, ClosingEndsRunWhileAnEnvironmentHangs) {
  TestFolder folder;
  Hanging hanging;
  RunningServer server(fake_env({.on_step = [&](int) { hanging.here(); }}), folder.address());
  Play play(options_for({folder.address()}));
  hanging.reached.wait();
  play.queue().close();
  play.end();
  hanging.go_on.notify();
}

TEST(ActorPoolTest, WhatEndsMeanwhileDoesNotPutOffTheCancelling) {
  TestFolder folder;
  Hanging hanging;
  RunningServer server(fake_env({.on_step = [&](int) { hanging.here(); }}), folder.address());
  Play play(options_for({folder.address()}));
  hanging.reached.wait();
  Notification over;
  Background<void> waking([&] {  // wakes the pool as a stream that ends does
    until([&] {
      play.pool().stop();
      return over.happened();
    });
  });
  play.queue().try_close();  // stop() may have closed it already
  play.end();
  over.notify();
  waking.get();
  hanging.go_on.notify();
}

TEST(ActorPoolTest, ClosingEndsRunWhileAServerIsNotThereYet) {
  TestFolder folder;
  Play play(options_for({folder.address()}));
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, AStopWhileTheThreadOfAStreamStartsEndsRun) {
  TestFolder folder;  // no server is there, and the thread often begins after the end
  ActorPoolOptions options = options_for({folder.address()});
  options.retries.connect_timeout = std::chrono::hours(1);
  for (int i = 0; i < 20; ++i) {
    const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
    const auto batcher = std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
    ActorPool pool(options, queue, batcher, ArrayNest());
    Background<void> run([&] { pool.run([&] { pool.stop(); }); });
    run.get();
  }
}

TEST(ActorPoolTest, AStreamThatIsGivenUpAfterTheCloseIsNoFailure) {
  TestFolder folder;
  const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
  const auto batcher = std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
  ActorPoolOptions options = options_for({folder.address()});
  options.retries.connect_timeout = 1ms;
  ActorPool pool(options, queue, batcher, ArrayNest());
  queue->close();
  EXPECT_EQ(message_of<ConnectionError>([&] { pool.run(); }), "nothing was thrown");
}

TEST(ActorPoolTest, AnOrderlyEndLetsServersGoOn) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  for (int i = 0; i < 2; ++i) {
    Play play(options_for({folder.address()}));
    play.take(1);
    play.queue().close();
    play.end();
  }
}

// ---- Failures --------------------------------------------------------------------------------

TEST(ActorPoolTest, AnEnvironmentsExceptionBeforeItsFirstRolloutEndsRun) {
  TestFolder folder;
  RunningServer healthy(fake_env(), folder.address(0));
  RunningServer failing(fake_env({.on_step =
                                      [](int step) {
                                        if (step == 2) throw EnvironmentFailure("ouch");
                                      }}),
                        folder.address(1));
  Play play(options_for({folder.address(0), folder.address(1)}));
  while (play.queue().dequeue()) continue;  // a learner, until the pool ends
  EXPECT_EQ(play.failure<EnvironmentFailure>(),
            "environment server at " + folder.address(1) + ": ouch");
  EXPECT_TRUE(play.reports().empty()) << "it is told once";
  EXPECT_TRUE(play.batcher().is_closed());
}

TEST(ActorPoolTest, TheFirstFailureIsTheOneThatArrives) {
  TestFolder folder;
  RunningServer server(fake_env({.on_step = [](int) { throw EnvironmentFailure("first"); }}),
                       folder.address(0));
  Hanging hanging;  // fails only when the pool, which has failed, closed the queue
  RunningServer later(fake_env({.on_step =
                                    [&](int) {
                                      hanging.here();
                                      throw EnvironmentFailure("second");
                                    }}),
                      folder.address(1));
  Play play(options_for({folder.address(0), folder.address(1)}));
  until([&] { return play.queue().is_closed(); }, "the queue being closed");
  hanging.go_on.notify();
  EXPECT_EQ(play.failure<EnvironmentFailure>(),
            "environment server at " + folder.address(0) + ": first");
}

TEST(ActorPoolTest, AHungEnvironmentIsATimeoutWithItsAddress) {
  TestFolder folder;
  Hanging hanging;
  RunningServer server(fake_env({.on_step = [&](int) { hanging.here(); }}), folder.address());
  ActorPoolOptions options = options_for({folder.address()});
  options.step_timeout = 300ms;
  Play play(options);
  EXPECT_EQ(play.failure<TimeoutError>(),
            "environment server at " + folder.address() + " sent no step within 300 ms");
  hanging.go_on.notify();
}

TEST(ActorPoolTest, AServerThatIsNeverThereIsAConnectionErrorWithItsAddress) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address(0));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.retries.connect_timeout = 200ms;
  Play play(options);
  while (play.queue().dequeue()) continue;
  EXPECT_EQ(play.failure<ConnectionError>(),
            "no environment server answers at " + folder.address(1) +
                " within 200 ms; start one there, or name the address of one that runs");
}

// What stands behind a complaint about the agent's answers.
std::string of_stream(int index, const std::string& address) {
  return " (stream " + std::to_string(index) + ", of the environment server at " + address + ")";
}

// The complaint about an answer, without the stream that it names.
std::string error_of_answer(const ArrayNest& answer) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  Play play(options_for({folder.address()}),
            [answer](const ArrayNest&, std::int64_t) { return answer; });
  const std::string error = play.failure<std::invalid_argument>();
  const std::string stream = of_stream(0, folder.address());
  EXPECT_TRUE(error.ends_with(stream)) << error;
  return error.substr(0, error.size() - std::min(error.size(), stream.size()));
}

TEST(ActorPoolTest, AnswersOfAnotherFormAreRefused) {
  const Array leaf = array_of<std::int64_t>({1, 1}, {0});
  EXPECT_EQ(error_of_answer(leaf), "Expected agent output to be tuple");
  EXPECT_EQ(error_of_answer(tuple({leaf, leaf, leaf})),
            "Expected agent output to be ((action, ...), new_state) but got sequence of length 3");
  EXPECT_EQ(error_of_answer(tuple({leaf, leaf})),
            "Expected first entry of agent output to be a (action, ...) tuple");
  EXPECT_EQ(error_of_answer(tuple({tuple({Array::zeros(DType::kInt64, {2, 1})}), leaf})),
            "every agent output needs shape [1, 1, ...], got [2, 1]");
}

TEST(ActorPoolTest, AnswersThatChangeTheirFormAreRefused) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  Play play(options_for({folder.address()}), [](const ArrayNest& inputs, std::int64_t version) {
    const ArrayNest answer = policy(inputs, version);
    if (version < 2) return answer;
    const Array small = Array::zeros(DType::kFloat32, {1, 1, 1});
    return tuple({tuple({answer.as_vector()[0].as_vector()[0], small}), answer.as_vector()[1]});
  });
  EXPECT_EQ(play.failure<std::invalid_argument>(),
            "agent output at [1]: expected float32[1, 1, 2] as before, got float32[1, 1, 1]" +
                of_stream(0, folder.address()));
}

TEST(ActorPoolTest, AStreamThatGetsNoMemoryEndsRunAndIsNamed) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  Play play(options_for({folder.address()}), [](const ArrayNest&, std::int64_t) {
    const Array huge = Array::spec(DType::kUInt8, {1, 1, std::int64_t{1} << 60});
    return tuple({tuple({huge}), Array::zeros(DType::kFloat32, {1, 1, 1})});
  });
  EXPECT_EQ(play.failure<std::bad_alloc>(), "out of memory" + of_stream(0, folder.address()));
}

// A host that has dialled in, and whose stream the pool plays.
class Hosting {
 public:
  Hosting(ActorPool* pool, const std::string& address, FakeEnvOptions options)
      : door_(address, {}),
        host_(fake_env(options), address, description(), "far-host"),
        run_([this] { message_of<LostStream>([this] { host_.play(kPatience); }); }) {
    const auto stream = door_.next(kPatience);
    door_.take(stream->id, [pool](EnvStream* joined) { return pool->play_joined(joined); });
  }
  ~Hosting() {
    host_.stop();
    run_.get();
  }

  // Waits until the pool has let the host go; returns why.
  std::string why() {
    std::vector<EndedStream> ended;
    until([&] { return !(ended = door_.ended()).empty(); }, "the end of a host's stream");
    return ended[0].why;
  }

 private:
  static EnvDescription description() {
    const ArrayNest frame(Array::spec(DType::kInt32, {1}));
    return {.observation = ArrayNest(ArrayNest::Map{{"frame", frame}})};
  }

  Door door_;
  Host host_;
  Background<void> run_;
};

TEST(ActorPoolTest, AHostWhoseFinalObservationsAreTooManyIsLetGoAndTheRunContinues) {
  TestFolder folder;
  ActorPoolOptions options = options_for({}, 20);
  options.max_rollout_bytes = 21 * 44 + 10;  // rows, and two final observations of 4 bytes
  Play play(options);
  EXPECT_EQ(Hosting(&play.pool(), folder.address(), {.first = 0}).why(),  // cut off every 6 steps
            "a stream's rollout with the final observations of its first 19 rows would take 0 MiB, "
            "expected at most 0: shorten --unroll_length, or serve fewer environments in a stream "
            "(more --num_servers)" +
                of_stream(0, "far-host"));
  EXPECT_EQ(play.pool().lost_streams(), 1);
  const Hosting modest(&play.pool(), folder.address(), {.first = 2});  // every 10 steps
  play.take(3);
}

TEST(ActorPoolTest, AWrongAnswerOfThePolicyForAHostEndsRun) {
  TestFolder folder;
  Play play(options_for({}), [](const ArrayNest& inputs, std::int64_t version) {
    const ArrayNest answer = policy(inputs, version);
    const Array small = Array::zeros(DType::kFloat32, {1, 1, 1});
    return version < 2 ? answer
                       : tuple({tuple({answer.as_vector()[0].as_vector()[0], small}),
                                answer.as_vector()[1]});
  });
  const Hosting host(&play.pool(), folder.address(), {});
  EXPECT_EQ(play.failure<std::invalid_argument>(),
            "agent output at [1]: expected float32[1, 1, 2] as before, got float32[1, 1, 1]" +
                of_stream(0, "far-host"));
}

TEST(ActorPoolTest, AnAnswerThatOneStreamCannotUseNamesThatStreamsServer) {
  TestFolder folder;
  RunningServer one(fake_env(), folder.address(0));
  RunningServer two(fake_env({.num_envs = 2}), folder.address(1));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.rollout_columns = 2;
  Play play(options);
  EXPECT_EQ(play.failure<std::invalid_argument>(),
            "rollouts of 2 columns cannot be cut from a stream of 1 environments; the first "
            "must divide the second" +
                of_stream(0, folder.address(0)));
}

// A pool of two streams whose inference holds what the first one asks, for ever, and answers the
// second one. The two are told apart by the number of their environments.
class HeldInference {
 public:
  explicit HeldInference(ActorPoolOptions options)
      : pool_(std::move(options), queue_, batcher_,
              ArrayNest(Array::zeros(DType::kFloat32, {1, 1, 1}))),
        inference_([this] { infer(); }),
        run_([this] { pool_.run(); }) {}

  void end() { run_.get(); }
  ~HeldInference() {
    batcher_->try_close();
    inference_.get();
  }

  Notification held;
  const std::shared_ptr<RolloutQueue> queue_ =
      std::make_shared<RolloutQueue>(RolloutQueueOptions{.queue = {.maximum_batch_size = 1}});

 private:
  void infer() {
    std::unique_ptr<Batch> of_second;  // may come before that of the first
    while (auto batch = batcher_->next()) {
      (batch->size() == 1 ? held_ : of_second) = std::move(batch);
      if (held_ == nullptr) continue;
      held.notify();
      if (of_second == nullptr) continue;
      of_second->set_outputs(policy(of_second->get_inputs(), 0), 0);
      of_second.reset();
    }
  }

  const std::shared_ptr<DynamicBatcher> batcher_ = std::make_shared<DynamicBatcher>(
      DynamicBatcherOptions{.queue = {.maximum_batch_size = 1, .timeout = std::nullopt}});
  std::unique_ptr<Batch> held_;
  ActorPool pool_;
  Background<void> inference_;
  Background<void> run_;
};

TEST(ActorPoolTest, AFailureArrivesThoughInferenceHoldsTheBatchOfAnotherStream) {
  TestFolder folder;
  RunningServer healthy(fake_env(), folder.address(0));
  RunningServer failing(
      fake_env({.num_envs = 2, .on_step = [](int) { throw EnvironmentFailure("ouch"); }}),
      folder.address(1));
  HeldInference play(options_for({folder.address(0), folder.address(1)}));
  EXPECT_EQ(message_of<EnvironmentFailure>([&] { play.end(); }),
            "environment server at " + folder.address(1) + ": ouch");
}

TEST(ActorPoolTest, ClosingEndsRunThoughInferenceHoldsABatch) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  HeldInference play(options_for({folder.address()}));
  play.held.wait();
  play.queue_->close();
  play.end();
}

TEST(ActorPoolTest, ABatchThatIsDroppedEndsRunAndNamesTheStream) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
  const auto batcher = std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
  ActorPool pool(options_for({folder.address()}), queue, batcher, ArrayNest());
  Background<void> run([&] { pool.run(); });
  batcher->next().reset();
  const std::string error = message_of<AsyncError>([&] { run.get(); });
  EXPECT_TRUE(error.ends_with(of_stream(0, folder.address()))) << error;
  EXPECT_TRUE(queue->is_closed());
}

TEST(ActorPoolTest, AnAnswerThatDoesNotComeInTimeEndsRunAndNamesTheStream) {
  TestFolder folder;
  RunningServer server(fake_env(), folder.address());
  const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
  const auto batcher = std::make_shared<DynamicBatcher>(
      DynamicBatcherOptions{.compute_timeout = std::chrono::milliseconds(20)});
  ActorPool pool(options_for({folder.address()}), queue, batcher, ArrayNest());
  EXPECT_EQ(message_of<TimeoutError>([&] { pool.run(); }),
            "Compute timeout reached." + of_stream(0, folder.address()));
}

TEST(ActorPoolTest, WhatPollThrowsEndsRun) {
  TestFolder folder;
  const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
  const auto batcher = std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
  ActorPool pool(options_for({folder.address()}), queue, batcher, ArrayNest());
  EXPECT_EQ(
      message_of<std::runtime_error>([&] { pool.run([] { throw std::runtime_error("Ctrl-C"); }); }),
      "Ctrl-C");
  EXPECT_EQ(message_of<std::runtime_error>([&] { pool.run(); }),
            "ActorPool.run() may be called once only");
}

TEST(ActorPoolTest, ImpossibleOptionsAreRefused) {
  const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
  const auto batcher = std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
  const auto error = [&](ActorPoolOptions options, auto q, auto b, ArrayNest state) {
    return message_of<std::invalid_argument>([&] { ActorPool(options, q, b, state); });
  };
  const ActorPoolOptions good = options_for({Endpoint("unix:x")});
  EXPECT_EQ(error(good, nullptr, batcher, {}), "learner_queue must not be None");
  EXPECT_EQ(error(good, queue, nullptr, {}), "inference_batcher must not be None");
  EXPECT_EQ(error(options_for({Endpoint("unix:x")}, 0), queue, batcher, {}),
            "unroll_length must be >= 1, got 0");
  EXPECT_EQ(error(good, queue, batcher, Array::zeros(DType::kFloat32, {1, 2, 3})),
            "initial_agent_state needs leaves [layers, 1, ...], one environment's, got [1, 2, 3]");
}

// ---- Lost streams ----------------------------------------------------------------------------

// A server whose every stream dies after `steps` steps, as that of a process that crashes does.
testing::Script dying(std::atomic<int>* connections, const std::function<int()>& steps) {
  const auto send = [](testing::VectorCall* stream) {
    rpcenv::VectorStep step;
    codec::encode(ArrayNest(ArrayNest::Map{{"frame", Array::zeros(DType::kInt32, {1, 1})}}),
                  step.mutable_observation());
    codec::encode(Array::zeros(DType::kFloat32, {1}), step.mutable_reward());
    codec::encode(Array::zeros(DType::kBool, {1}), step.mutable_terminated());
    codec::encode(Array::zeros(DType::kBool, {1}), step.mutable_truncated());
    codec::encode(Array::zeros(DType::kBool, {1}), step.mutable_episode_end());
    codec::encode(Array::zeros(DType::kInt32, {1}), step.mutable_episode_step());
    codec::encode(Array::zeros(DType::kFloat32, {1}), step.mutable_episode_return());
    return stream->Write(step);
  };
  return {.describe =
              [](rpcenv::Description* message) {
                message->set_protocol_version(1);
                message->set_num_envs(1);
                message->set_num_streams(1);
                message->set_frame_stack(1);
                codec::encode_spec(
                    ArrayNest(ArrayNest::Map{{"frame", Array::spec(DType::kInt32, {1})}}),
                    message->mutable_observation());
                return grpc::Status::OK;
              },
          .vector_stream =
              [=](testing::VectorCall* stream) {
                ++*connections;
                rpcenv::VectorAction action;
                for (int left = steps(); left >= 0 && stream->Read(&action); --left) send(stream);
                return grpc::Status(grpc::StatusCode::UNAVAILABLE, "the process crashed");
              }};
}

TEST(ActorPoolTest, AStreamWhoseServerRestartsStartsAgainWithAnotherSeed) {
  TestFolder folder;
  std::atomic<std::uint64_t> first_seed = 0, second_seed = 0;
  auto server = std::make_unique<RunningServer>(
      fake_env({.frame_stack = 2, .on_reset = [&](std::uint64_t seed) { first_seed = seed; }}),
      folder.address());
  Play play(options_for({folder.address()}));
  play.take(2);
  server.reset();
  RunningServer again(fake_env({.frame_stack = 2,
                                .first = 7,
                                .on_reset = [&](std::uint64_t seed) { second_seed = seed; }}),
                      folder.address());
  std::int64_t rollouts = 0, before = 2;
  while (rollouts < 3) {
    const QueueItem item = play.take(1).at(0);
    const Array frame =
        item.data.as_vector()[0].as_vector()[0].as_vector()[0].as_map().at("frame").as_leaf();
    const bool is_new = frame.as<std::int32_t>()[0] >= 7'000'000;
    std::size_t next_final = 0;
    const std::int64_t first = is_new ? before + 1 : 0;  // one number is left out
    const std::int64_t number = check_column(item, 0, is_new ? 7 : 0, &next_final, first);
    if (!is_new) {
      before = number + 1;
      continue;
    }
    EXPECT_EQ(number, rollouts++) << "what was unfinished is dropped";
  }
  EXPECT_EQ(play.pool().lost_streams(), 1);
  EXPECT_NE(first_seed, second_seed);
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, OptionsReachRunningStreamsOnceAndLaterOnesBeforeTheirFirstEpisode) {
  TestFolder folder;
  Mutex mutex;
  std::vector<std::string> events;
  const auto note = [&](const std::string& event) {
    MutexLock lock(mutex);
    events.push_back(event);
  };
  const auto noted = [&] {
    MutexLock lock(mutex);
    return events;
  };
  const auto env = [&](int first) {
    return fake_env({.frame_stack = 2,
                     .first = first,
                     .on_reset =
                         [&](std::uint64_t seed) {
                           if (seed != 0) note("reset");  // 0: to describe itself
                         },
                     .on_options = note});
  };
  auto server = std::make_unique<RunningServer>(env(0), folder.address());
  Play play(options_for({folder.address()}));
  play.take(1);
  play.pool().set_env_options("{}");
  while (noted().size() < 2) play.take(1);
  play.take(3);
  EXPECT_EQ(noted(), (std::vector<std::string>{"reset", "{}"}));
  server.reset();
  RunningServer again(env(7), folder.address());
  while (noted().size() < 4) play.take(1);
  play.take(3);
  EXPECT_EQ(noted(), (std::vector<std::string>{"reset", "{}", "{}", "reset"}));
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, AStreamWhoseServerServesSomethingElseAfterARestartEndsRun) {
  TestFolder folder;
  auto server = std::make_unique<RunningServer>(fake_env(), folder.address(),
                                                EnvServerOptions{.env_id = "Pong"});
  Play play(options_for({folder.address()}));
  play.take(1);
  server.reset();
  RunningServer again(fake_env(), folder.address(), EnvServerOptions{.env_id = "Breakout"});
  while (play.queue().dequeue()) continue;
  const std::string error = play.failure<std::invalid_argument>();
  EXPECT_NE(error.find("the environment is Breakout, before it was Pong"), std::string::npos);
  EXPECT_NE(error.find(folder.address()), std::string::npos);
}

TEST(ActorPoolTest, AnUnknownErrorOfTheTransportIsALossAndNoFailure) {
  TestFolder folder;
  std::atomic<int> connections = 0;
  testing::Script script = dying(&connections, [&] { return connections == 1 ? 4 : 100; });
  script.describe = [describe = script.describe](rpcenv::Description* message) {
    const grpc::Status status = describe(message);
    message->set_marks_failures(true);
    return status;
  };
  script.vector_stream = [stream = script.vector_stream](testing::VectorCall* call) {
    stream(call);
    return grpc::Status(grpc::StatusCode::UNKNOWN, "Stream removed");
  };
  testing::ScriptedServer server(script, folder.address());
  Play play(options_for({folder.address()}));
  EXPECT_EQ(play.take(3).size(), 3u);
  EXPECT_EQ(play.pool().lost_streams(), 1);
  play.queue().close();
  play.end();
}

// Each reconnection but the last is asked for its description in vain, for another reason of
// gRPC's.
TEST(ActorPoolTest, ADescriptionThatTheTransportLosesIsAskedForAgain) {
  const std::vector<grpc::StatusCode> codes = {
      grpc::StatusCode::RESOURCE_EXHAUSTED, grpc::StatusCode::INTERNAL, grpc::StatusCode::UNKNOWN};
  TestFolder folder;
  std::atomic<int> connections = 0;
  std::atomic<std::size_t> questions = 0;
  testing::Script script = dying(&connections, [&] { return connections == 1 ? 4 : 100; });
  script.describe = [&, describe = script.describe](rpcenv::Description* message) {
    const std::size_t question = questions++;
    const grpc::Status status = describe(message);
    message->set_marks_failures(true);
    const bool lost = question >= 1 && question <= codes.size();
    return lost ? grpc::Status(codes[question - 1], "RST_STREAM") : status;
  };
  testing::ScriptedServer server(script, folder.address());
  Play play(options_for({folder.address()}));
  EXPECT_EQ(play.take(3).size(), 3u);
  EXPECT_EQ(questions, codes.size() + 2);
  EXPECT_TRUE(play.reports().empty()) << "no failure of an environment";
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, AServerThatIsUsedUpAtTheStartIsAskedAgain) {
  TestFolder folder;
  std::atomic<int> connections = 0, questions = 0;
  testing::Script script = dying(&connections, [] { return 100; });
  script.describe = [&, describe = script.describe](rpcenv::Description* message) {
    if (++questions > 1) return describe(message);
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "No more calls");
  };
  testing::ScriptedServer server(script, folder.address());
  Play play(options_for({folder.address()}));
  EXPECT_EQ(play.take(1).size(), 1u);
  EXPECT_EQ(questions, 2);
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, ALostStreamEndsRunWhenItStaysAwayAndTooFewLive) {
  TestFolder folder;
  auto server = std::make_unique<RunningServer>(fake_env(), folder.address());
  ActorPoolOptions options = options_for({folder.address()});
  options.retries.reconnect_timeout = 1ms;
  Play play(options);
  play.take(1);
  server.reset();
  while (play.queue().dequeue()) continue;
  EXPECT_NE(play.failure<ConnectionError>().find(folder.address()), std::string::npos);
  EXPECT_EQ(play.pool().lost_streams(), 1);
}

TEST(ActorPoolTest, AConnectionThatIsLostBeforeItsFirstStepIsTriedAgain) {
  TestFolder folder;
  std::atomic<int> connections = 0, questions = 0;
  testing::Script script = dying(&connections, [&] { return connections <= 2 ? -1 : 100; });
  script.describe = [&, describe = script.describe](rpcenv::Description* message) {
    return ++questions == 1 ? grpc::Status(grpc::StatusCode::CANCELLED, "") : describe(message);
  };
  testing::ScriptedServer server(script, folder.address());
  Play play(options_for({folder.address()}));
  EXPECT_EQ(play.take(1).size(), 1u);
  EXPECT_EQ(questions, 4);
  EXPECT_EQ(connections, 3);
  EXPECT_EQ(play.pool().lost_streams(), 0) << "what never came up cannot be lost";
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, AServerThatNeverComesUpIsAConnectionErrorWithItsAddress) {
  TestFolder folder;
  std::atomic<int> connections = 0;
  testing::ScriptedServer server(dying(&connections, [] { return -1; }), folder.address());
  ActorPoolOptions options = options_for({folder.address()});
  options.retries.connect_timeout = 500ms;
  Play play(options);
  const std::string error = play.failure<ConnectionError>();
  EXPECT_EQ(error,
            "environment server at " + folder.address() +
                ": connection lost (the process crashed); this was connection " +
                std::to_string(connections) +
                ", and none brought a first step within 500 ms: look into that server's log");
  EXPECT_GT(connections, 1);
}

TEST(ActorPoolTest, AStreamThatDiesAgainAndAgainBeforeItsFirstRolloutEndsRun) {
  TestFolder folder;
  std::atomic<int> connections = 0;
  testing::ScriptedServer server(dying(&connections, [] { return 2; }), folder.address());
  ActorPoolOptions options = options_for({folder.address()}, 3);
  options.retries.fruitless_connections = 3;
  Play play(options);
  EXPECT_EQ(play.failure<ConnectionError>(),
            "environment server at " + folder.address() +
                ": connection lost (the process crashed); this was connection 3 in a row that "
                "ended before its first rollout: look into that server's log");
  EXPECT_EQ(connections, 3);
}

TEST(ActorPoolTest, ARolloutNowAndThenKeepsAStreamThatDiesOften) {
  TestFolder folder;
  std::atomic<int> connections = 0;
  // Every second connection lives for one rollout, the others for none.
  testing::ScriptedServer server(dying(&connections, [&] { return connections % 2 == 0 ? 3 : 2; }),
                                 folder.address());
  ActorPoolOptions options = options_for({folder.address()}, 3);
  options.retries.fruitless_connections = 2;
  Play play(options);
  EXPECT_EQ(play.take(3).size(), 3u);
  EXPECT_GE(play.pool().lost_streams(), 5) << "the third rollout is that of connection 6";
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, TheOthersPlayOnWhileAStreamIsAway) {
  TestFolder folder;
  RunningServer healthy(fake_env({.frame_stack = 2}), folder.address(0));
  auto server = std::make_unique<RunningServer>(fake_env({.frame_stack = 2}), folder.address(1));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.retries.reconnect_timeout = 1ms;
  Play play(options);
  until([&] { return play.pool().live_streams() == 2; }, "both streams being live");
  server.reset();
  while (play.pool().lost_streams() == 0) play.take(1);
  EXPECT_EQ(play.take(20).size(), 20u);
  EXPECT_EQ(play.pool().live_streams(), 1);
  ASSERT_EQ(play.pool().away_streams().size(), 1u);
  EXPECT_EQ(play.pool().away_streams()[0].address, folder.address(1));
  EXPECT_GT(play.pool().away_streams()[0].away, 0ms);
  until([&] { return play.pool().away_streams()[0].why.empty(); }, "nobody answering there");
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, ClosingEndsRunWhileAStreamIsAway) {
  TestFolder folder;
  auto server = std::make_unique<RunningServer>(fake_env(), folder.address());
  Play play(options_for({folder.address()}));
  play.take(1);
  server.reset();
  while (play.pool().lost_streams() == 0) {
    if (play.queue().size() > 0) play.take(1);
  }
  play.batcher().close();
  play.end();
}

// ---- Environments that fail ------------------------------------------------------------------

// Environments that raise in every eighth step, which is after two rollouts of three steps.
EnvFactory failing_after_two_rollouts() {
  return fake_env({.frame_stack = 2, .on_step = [](int step) {
                     if (step == 7) throw EnvironmentFailure("ouch");
                   }});
}

TEST(ActorPoolTest, EnvironmentsThatFailAreMadeAnewAndNoRolloutSpansTheGap) {
  TestFolder folder;
  RunningServer server(failing_after_two_rollouts(), folder.address());
  ActorPoolOptions options = options_for({folder.address()});
  options.retries.failures = 100;
  Play play(options);
  std::int64_t taken = 0;
  for (const QueueItem& item : play.take(8)) {
    std::size_t next_final = 0;
    const std::int64_t connection = taken / 2, first = 3 * connection;  // one number is left out
    EXPECT_EQ(check_column(item, 0, 0, &next_final, first), taken % 2);
    ++taken;
  }
  until([&] { return play.reports().size() >= 3; }, "three reports");
  EXPECT_GE(play.pool().restarted_streams(), 3);
  EXPECT_EQ(play.pool().lost_streams(), 0) << "no connection was lost";
  EXPECT_EQ(play.reports()[1],
            "stream 0 gets new environments after failure 2 within 600 s, and is retired after "
            "100: environment server at " +
                folder.address() + ": ouch");
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, AStreamThatFailsTooOftenIsRetiredAndTheOthersPlayOn) {
  TestFolder folder;
  RunningServer healthy(fake_env({.frame_stack = 2}), folder.address(0));
  RunningServer failing(failing_after_two_rollouts(), folder.address(1));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.retries.failures = 2;
  Play play(options);
  while (play.pool().retired_streams() == 0) play.take(1);
  while (play.reports().size() < 2) play.take(1);
  EXPECT_EQ(play.take(20).size(), 20u);
  EXPECT_EQ(play.reports()[1],
            "stream 1 is retired after failure 2 within 600 s, 1 of 2 streams are left: "
            "environment server at " +
                folder.address(1) + ": ouch");
  EXPECT_EQ(play.pool().live_streams(), 1);
  EXPECT_EQ(play.pool().restarted_streams(), 1);
  EXPECT_TRUE(play.pool().away_streams().empty()) << "it does not come back";
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, ARetiredStreamThatLeavesTooFewEndsRunWithItsError) {
  TestFolder folder;
  RunningServer healthy(fake_env({.frame_stack = 2}), folder.address(0));
  RunningServer failing(failing_after_two_rollouts(), folder.address(1));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.retries.failures = 2;
  options.min_streams = 2;
  Play play(options);
  while (play.queue().dequeue()) continue;
  EXPECT_EQ(play.failure<EnvironmentFailure>(),
            "stream 1 is retired after failure 2 within 600 s, 1 of 2 streams are left, and the "
            "run needs 2 (min_streams): environment server at " +
                folder.address(1) + ": ouch");
}

TEST(ActorPoolTest, AServerWhoseConnectionsNeverLastIsRetiredOnceItHasPlayed) {
  TestFolder folder;
  std::atomic<int> connections = 0;
  RunningServer healthy(fake_env(), folder.address(0));
  testing::ScriptedServer server(dying(&connections, [&] { return connections == 1 ? 3 : 2; }),
                                 folder.address(1));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)}, 3);
  options.retries.fruitless_connections = 2;
  Play play(options);
  while (play.pool().retired_streams() == 0) play.take(1);
  EXPECT_EQ(connections, 3);
  EXPECT_EQ(play.take(5).size(), 5u);
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, AnEnvironmentThatHangsAfterARolloutIsMadeAnew) {
  TestFolder folder;
  Hanging hanging;
  std::atomic<int> environments = 0;
  RunningServer server(fake_env({.on_reset = [&](std::uint64_t) { ++environments; },
                                 .on_step =
                                     [&](int step) {
                                       if (step == 7 && environments == 2) hanging.here();
                                     }}),
                       folder.address());  // the first environment only describes
  ActorPoolOptions options = options_for({folder.address()});
  options.step_timeout = 300ms;
  Play play(options);
  EXPECT_EQ(play.take(5).size(), 5u);
  EXPECT_EQ(play.pool().restarted_streams(), 1);
  hanging.go_on.notify();
  play.queue().close();
  play.end();
}

// ---- How few streams a run needs ---------------------------------------------------------------

TEST(ActorPoolTest, FewerConnectedStreamsThanTheRunNeedsEndItAfterTheReconnectTimeout) {
  TestFolder folder;
  RunningServer healthy(fake_env(), folder.address(0));
  auto server = std::make_unique<RunningServer>(fake_env(), folder.address(1));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.retries.reconnect_timeout = 1ms;
  options.min_streams = 2;
  Play play(options);
  until([&] { return play.pool().live_streams() == 2; }, "both streams");
  server.reset();
  while (play.queue().dequeue()) continue;
  const std::string error = play.failure<ConnectionError>();
  EXPECT_TRUE(
      error.starts_with("1 of 2 streams are connected, and the run needs 2 (min_streams); "
                        "the last loss: "))
      << error;
  EXPECT_NE(error.find(folder.address(1)), std::string::npos) << error;
}

// The number of connected streams in a shortage; -1 while there is none. Takes the rollouts that
// there are: a stream that waits for room in the queue would not notice its loss.
std::int64_t connected_in_shortage(Play* play) {
  play->take(static_cast<std::size_t>(play->queue().size()));
  const auto found = play->pool().shortage();
  return found ? found->connected : -1;
}

// The earliest and the latest time at which the pool's shortage may end its run.
std::pair<Clock::time_point, Clock::time_point> end_of_run(ActorPool* pool) {
  const auto before = Clock::now();
  const Clock::duration left = pool->shortage().value().left;
  return {before + left, Clock::now() + left};
}

TEST(ActorPoolTest, APoolWithTooFewConnectedStreamsSaysSoUntilEnoughAreBack) {
  TestFolder folder;
  RunningServer healthy(fake_env(), folder.address(0));
  auto server = std::make_unique<RunningServer>(fake_env(), folder.address(1));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.min_streams = 2;
  Play play(options);
  ActorPool& pool = play.pool();
  EXPECT_FALSE(pool.shortage()) << "streams connect for the first time";
  until([&] { return pool.live_streams() == 2; }, "both streams");
  EXPECT_FALSE(pool.shortage());
  server.reset();
  const auto is_short = [&] { return connected_in_shortage(&play) == 1; };
  until(is_short, "the loss");
  const auto first = pool.shortage();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->connected, 1);
  EXPECT_EQ(first->needed, 2);
  EXPECT_LE(first->left, kPatience);
  EXPECT_GT(first->left, kPatience / 2);
  const auto asked = Clock::now();
  until([&] { return Clock::now() > asked; });
  EXPECT_LT(pool.shortage()->left, first->left) << "the time runs";
  server = std::make_unique<RunningServer>(fake_env(), folder.address(1));
  until([&] { return !pool.shortage(); }, "the reconnection");
  server.reset();
  until(is_short, "another loss");
  pool.stop();
  EXPECT_FALSE(pool.shortage()) << "a pool that stops needs none";
  play.end();
}

TEST(ActorPoolTest, StreamsThatComeAndGoInTurnDoNotPutOffTheEnd) {
  TestFolder folder;
  const auto serve = [&](int i) {
    return std::make_unique<RunningServer>(fake_env(), folder.address(i));
  };
  auto a = serve(0), b = serve(1);
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1)});
  options.min_streams = 2;
  Play play(options);
  ActorPool& pool = play.pool();
  until([&] { return pool.live_streams() == 2; }, "both streams");
  a.reset();
  until([&] { return connected_in_shortage(&play) == 1; }, "the loss of A");
  const auto announced = end_of_run(&pool);
  b.reset();
  until([&] { return connected_in_shortage(&play) == 0; }, "the loss of B");
  a = serve(0);
  until([&] { return connected_in_shortage(&play) == 1; }, "A");
  const auto still = end_of_run(&pool);
  EXPECT_LE(still.first, announced.second);
  EXPECT_LE(announced.first, still.second);
  b = serve(1);
  until([&] { return connected_in_shortage(&play) == -1; }, "B");
  a.reset();
  until([&] { return connected_in_shortage(&play) == 1; }, "another loss");
  EXPECT_GT(end_of_run(&pool).first, still.second) << "the next shortage begins anew";
  pool.stop();
  play.end();
}

TEST(ActorPoolTest, ByDefaultHalfAreNeededAndRetiredStreamsCountAmongAllOfThem) {
  TestFolder folder;
  RunningServer healthy(fake_env({.frame_stack = 2}), folder.address(0));
  RunningServer failing(failing_after_two_rollouts(), folder.address(1));
  auto server = std::make_unique<RunningServer>(fake_env({.frame_stack = 2}), folder.address(2));
  ActorPoolOptions options = options_for({folder.address(0), folder.address(1), folder.address(2)});
  options.retries.failures = 2;
  Play play(options);
  while (play.pool().retired_streams() == 0) play.take(1);
  EXPECT_FALSE(play.pool().shortage()) << "two of three are connected";
  server.reset();
  until([&] { return connected_in_shortage(&play) == 1; }, "the loss");
  EXPECT_EQ(play.pool().shortage().value().needed, 2) << "half of three, rounded up";
  play.queue().close();
  play.end();
}

TEST(ActorPoolTest, AnImpossibleNumberOfNeededStreamsIsRefused) {
  const auto queue = std::make_shared<RolloutQueue>(RolloutQueueOptions{});
  const auto batcher = std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
  for (const std::int64_t needed : {-1, 2}) {
    ActorPoolOptions options = options_for({Endpoint("unix:x")});
    options.min_streams = needed;
    EXPECT_EQ(
        message_of<std::invalid_argument>([&] { ActorPool(options, queue, batcher, ArrayNest()); }),
        "min_streams must be at most the number of streams, 1, got " + std::to_string(needed));
  }
}

}  // namespace
}  // namespace torchbeast
