// SPDX-License-Identifier: Apache-2.0
//
// A learner's pool consumes the rollouts of generated hosts, in both directions.

#include "benchmarks/load_generator.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "libtorchbeast/acting/actor_pool.h"
#include "libtorchbeast/server/door.h"
#include "libtorchbeast/testing/servers.h"
#include "libtorchbeast/testing/threads.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast::load {
namespace {

using testing::Background;
using testing::kPatience;
using testing::TestFolder;
using testing::until;

constexpr std::int64_t kUnroll = 5, kEnvs = 3, kEpisode = 7;

LoadOptions three_hosts() {
  return {.num_hosts = 3,
          .envs_per_stream = kEnvs,
          .step_time = std::chrono::microseconds(500),
          .frame = {2, 5},
          .episode_steps = kEpisode};
}

// A pool whose policy answers zeros, and the thread of a generator.
class Learning {
 public:
  explicit Learning(LoadGenerator* generator, std::vector<Endpoint> servers = {})
      : generator_(generator),
        pool_({.unroll_length = kUnroll,
               .endpoints = std::move(servers),
               .retries = {.connect_timeout = kPatience, .reconnect_timeout = kPatience}},
              queue_, batcher_, ArrayNest(Array::zeros(DType::kFloat32, {1, 1, 1}))) {}
  ~Learning() {
    batcher_->try_close();
    queue_->try_close();
    run_.get();
    inference_.get();
    generator_->stop();
    hosts_.get();
  }

  QueueItem next() { return std::move(*queue_->dequeue()); }
  ActorPool& pool() { return pool_; }

 private:
  void infer() {
    while (const auto batch = batcher_->next()) {
      const ArrayNest inputs = batch->get_inputs();
      const std::int64_t size = inputs.as_vector()[0].as_vector()[1].as_leaf().size(1);
      const ArrayNest action(Array::zeros(DType::kInt64, {1, size}));
      batch->set_outputs(testing::tuple({testing::tuple({action}), inputs.as_vector()[1]}), 0);
    }
  }

  LoadGenerator* const generator_;
  const std::shared_ptr<RolloutQueue> queue_ = std::make_shared<RolloutQueue>(
      RolloutQueueOptions{.queue = {.maximum_batch_size = 1, .maximum_queue_size = 4}});
  const std::shared_ptr<DynamicBatcher> batcher_ =
      std::make_shared<DynamicBatcher>(DynamicBatcherOptions{});
  ActorPool pool_;
  Background<void> hosts_{[this] { generator_->run(); }};
  Background<void> inference_{[this] { infer(); }};
  Background<void> run_{[this] { pool_.run(); }};
};

// What row n of environment e is, by the comment of GeneratedEnvs.
void check_row(const std::vector<ArrayNest>& rows, std::int64_t row, std::int64_t n,
               std::int64_t e) {
  std::uint32_t counter[2];
  std::memcpy(counter, rows[0].as_leaf().data() + 10 * row, sizeof(counter));
  EXPECT_EQ(counter[0], n);
  EXPECT_EQ(counter[1], e);
  EXPECT_EQ(rows[0].as_leaf().as<std::uint8_t>()[10 * row + 9], e + 1);
  const bool is_over = n > 0 && (n + e) % kEpisode == 0;
  EXPECT_EQ(rows[1].as_leaf().as<float>()[row], is_over ? 1 : 0);
  EXPECT_EQ(rows[2].as_leaf().as<bool>()[row], is_over || n == 0);
  std::int64_t steps = n;  // in its episode, counted back to the end of the previous one
  for (std::int64_t s = 1; s <= n; ++s) {
    if ((n - s) > 0 && (n - s + e) % kEpisode == 0) {
      steps = s;
      break;
    }
  }
  EXPECT_EQ(rows[3].as_leaf().as<std::int32_t>()[row], steps);
}

// Takes rollouts until every stream has sent `count`, and compares each row.
void check_rollouts(Learning* learning, std::size_t streams, std::int64_t count) {
  std::map<std::int64_t, std::int64_t> rollouts;  // by stream
  std::size_t ready = 0;
  while (ready < streams) {
    const QueueItem item = learning->next();
    const auto& rows = item.data.as_vector()[0].as_vector()[0].as_vector();
    const std::int64_t env = item.info.as_map().at("stream").as_leaf().as<std::int64_t>()[0];
    const std::int64_t number = rollouts[env / kMaxEnvsPerStream]++;
    for (std::int64_t t = 0; t <= kUnroll; ++t) {
      for (std::int64_t e = 0; e < kEnvs; ++e) {
        check_row(rows, t * kEnvs + e, number * kUnroll + t, e);
      }
    }
    ready += number + 1 == count;
  }
}

TEST(LoadGeneratorTest, ServersSendEveryStepOnceAndInOrder) {
  const TestFolder folder;
  const std::vector<Endpoint> servers{folder.address(0), folder.address(1), folder.address(2)};
  LoadGenerator generator(three_hosts());
  generator.serve(servers);
  Learning learning(&generator, servers);
  check_rollouts(&learning, 3, 8);
  EXPECT_EQ(generator.counts().playing, 3);
}

TEST(LoadGeneratorTest, HostsThatDialInSendEveryStepOnceAndInOrder) {
  const TestFolder folder;
  LoadGenerator generator(three_hosts());
  generator.dial(folder.address());
  Door door(folder.address(), {});
  Learning learning(&generator);
  for (int i = 0; i < 3; ++i) {
    door.take(door.next(kPatience)->id,
              [&](EnvStream* joined) { return learning.pool().play_joined(joined); });
  }
  check_rollouts(&learning, 3, 8);
  EXPECT_EQ(door.hosts().size(), 3);
}

TEST(LoadGeneratorTest, HostsDialAgainUntilTheRunHasEnded) {
  const TestFolder folder;
  LoadOptions options = three_hosts();
  options.connect_timeout = std::chrono::milliseconds(100);
  options.longest_pause = std::chrono::milliseconds(200);
  LoadGenerator generator(options);
  generator.dial(folder.address());
  Background<void> hosts([&] { generator.run(); });
  until([&] { return generator.counts().attempts > 3; }, "a second attempt without a learner");
  {
    Door door(folder.address(), {});
    door.refuse(door.next(kPatience)->id, "not now");
    until([&] { return generator.counts().refused > 0; }, "the refusal of a host");
    // A door that closes before any host has dialled again tells nobody that the run has ended.
    ASSERT_TRUE(door.next(kPatience));
    door.close(true);
  }
  until([&] { return generator.counts().finished > 0; }, "the end of the run");
  generator.stop();
  hosts.get();
}

}  // namespace
}  // namespace torchbeast::load
