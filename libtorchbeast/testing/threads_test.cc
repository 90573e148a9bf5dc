// SPDX-License-Identifier: Apache-2.0
//
// What a test program that hangs says about itself.

#include "libtorchbeast/testing/threads.h"

#include <gtest/gtest.h>

namespace torchbeast::testing {
namespace {

#ifdef __GLIBC__
TEST(PatienceDeathTest, AProgramThatHangsTellsWhatItDidAndWhereItsThreadsAre) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        const Patience patience;
        Hanging hanging;
        Background<void> other([&] { hanging.here(); });
        hanging.reached.wait();
        patience.die("the end of a test");
      },
      "the end of a test did not happen .* used [0-9.]+ s of CPU .* switched [0-9]+ times"
      "\n\nthread [0-9]+\n.*\n\nthread [0-9]+\n.*\n");
}
#endif

}  // namespace
}  // namespace torchbeast::testing
