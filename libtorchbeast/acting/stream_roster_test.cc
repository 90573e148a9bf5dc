// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/stream_roster.h"

#include <gtest/gtest.h>

#include "libtorchbeast/stream/stream_errors.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using namespace std::chrono_literals;
using testing::message_of;
using End = StreamRoster::End;

const LostStream lost("environment server at B: connection lost (it crashed)");
const NobodyAnswers unanswered("no environment server answers at B within 5 s");

// A roster of streams 0, 1, ... whose servers' addresses are A, B, ...
struct Streams {
  explicit Streams(int count, std::int64_t min_streams = 0, RetryOptions retries = {})
      : roster(min_streams, retries) {
    for (int i = 0; i < count; ++i) roster.add(std::string(1, static_cast<char>('A' + i)));
  }
  // The connected and needed streams in a shortage, or {} if there is none.
  std::vector<std::int64_t> shortage() {
    const auto shortage = roster.shortage();
    return shortage ? std::vector{shortage->connected, shortage->needed}
                    : std::vector<std::int64_t>{};
  }
  void lose(std::int64_t number) { roster.connects_again(number, lost, true, 0); }

  StreamRoster roster;
};

using Counts = std::vector<std::int64_t>;

TEST(StreamRosterTest, AStreamThatConnectsForTheFirstTimeIsPresent) {
  Streams streams(2, 2);
  EXPECT_EQ(streams.shortage(), Counts{});
  streams.roster.connects_again(1, unanswered, false, 0);
  EXPECT_EQ(streams.shortage(), Counts{}) << "it has not been up yet";
  EXPECT_TRUE(streams.roster.away_streams().empty());
}

TEST(StreamRosterTest, ALostStreamIsAwayUntilItComesUpAgain) {
  Streams streams(2, 2);
  streams.roster.came_up(1);
  EXPECT_EQ(streams.roster.counts().live, 1);
  streams.roster.went_down();
  streams.lose(1);
  EXPECT_EQ(streams.roster.counts().live, 0);
  EXPECT_EQ(streams.shortage(), (Counts{1, 2}));
  auto away = streams.roster.away_streams();
  ASSERT_EQ(away.size(), 1u);
  EXPECT_EQ(away[0].address, "B");
  EXPECT_EQ(away[0].why, "connection lost (it crashed)");
  streams.roster.connects_again(1, unanswered, true, 0);
  EXPECT_EQ(streams.roster.away_streams().at(0).why, "") << "nobody answers now";
  EXPECT_GE(streams.roster.away_streams().at(0).away, away[0].away) << "since its loss";
  streams.roster.came_up(1);
  EXPECT_TRUE(streams.roster.away_streams().empty());
  EXPECT_EQ(streams.shortage(), Counts{});
}

TEST(StreamRosterTest, AFailureThatIsTriedAgainIsCountedAndReportedOnce) {
  Streams streams(2, 0, {.failures = 3, .failure_window = 10min});
  streams.roster.connects_again(1, EnvironmentFailure("environment server at B: ouch"), true, 2);
  EXPECT_EQ(streams.roster.counts().restarted, 1);
  EXPECT_EQ(streams.roster.counts().lost, 0);
  EXPECT_EQ(streams.roster.take_reports(),
            (std::vector<std::string>{"stream 1 gets new environments after failure 2 within "
                                      "600 s, and is retired after 3: environment server at B: "
                                      "ouch"}));
  EXPECT_TRUE(streams.roster.take_reports().empty());
}

TEST(StreamRosterTest, ARetiredStreamIsNeitherPresentNorAwayButCountsAmongAll) {
  Streams streams(3);
  streams.lose(1);
  EXPECT_EQ(streams.roster.retire(1, "ouch", 5), std::nullopt);
  EXPECT_EQ(streams.roster.counts().retired, 1);
  EXPECT_TRUE(streams.roster.away_streams().empty()) << "it does not come back";
  EXPECT_EQ(streams.roster.take_reports(),
            (std::vector<std::string>{"stream 1 is retired after failure 5 within 600 s, 2 of 3 "
                                      "streams are left: ouch"}));
  EXPECT_EQ(streams.shortage(), Counts{});
  streams.lose(2);
  EXPECT_EQ(streams.shortage(), (Counts{1, 2})) << "half of three, rounded up";
}

TEST(StreamRosterTest, ARetirementThatLeavesTooFewIsNoReportButEndsTheRun) {
  Streams streams(2, 2);
  EXPECT_EQ(streams.roster.retire(1, "ouch", 0),
            "stream 1 is retired, 1 of 2 streams are left, and the run needs 2 (min_streams): "
            "ouch");
  EXPECT_TRUE(streams.roster.take_reports().empty()) << "it is told once";
}

TEST(StreamRosterTest, TheStreamOfAHostThatHasLeftIsForgottenAndItsNumberIsNotUsedAgain) {
  Streams streams(0);
  EXPECT_EQ(streams.shortage(), (Counts{0, 1})) << "no host has joined yet";
  EXPECT_EQ(streams.roster.add("host"), 0);
  EXPECT_EQ(streams.roster.add("host"), 1);
  EXPECT_EQ(streams.roster.add("host"), 2);
  streams.roster.remove(1, End::kLost, lost);
  streams.roster.remove(2, End::kFailed, EnvironmentFailure("ouch"));
  EXPECT_EQ(streams.roster.counts().lost, 1);
  EXPECT_EQ(streams.roster.counts().restarted, 1);
  EXPECT_EQ(streams.shortage(), Counts{});
  EXPECT_EQ(streams.roster.add("host"), 3);
  streams.lose(0);
  streams.lose(3);
  EXPECT_EQ(streams.shortage(), (Counts{0, 1})) << "there are two, of which half are needed";
}

TEST(StreamRosterTest, AShortageThatLastsTooLongIsAnErrorWithTheLastLoss) {
  Streams streams(2, 2, {.reconnect_timeout = 0ms});
  streams.roster.check_enough();
  streams.lose(1);
  streams.roster.connects_again(1, unanswered, true, 0);  // its loss says more
  EXPECT_EQ(message_of<ConnectionError>([&] { streams.roster.check_enough(); }),
            "1 of 2 streams are connected, and the run needs 2 (min_streams); the last loss: " +
                std::string(lost.what()));
}

TEST(StreamRosterTest, AShortageThatHasTimeLeftIsNoError) {
  Streams streams(1, 1, {.reconnect_timeout = 1h});
  streams.lose(0);
  EXPECT_EQ(message_of<ConnectionError>([&] { streams.roster.check_enough(); }),
            "nothing was thrown");
}

}  // namespace
}  // namespace torchbeast
