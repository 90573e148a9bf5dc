// SPDX-License-Identifier: Apache-2.0
//
// The promises of array.h, array_ops.h and buffer.h. The oracle computes element by element.

#include "libtorchbeast/memory/array_ops.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <new>
#include <thread>

#include "libtorchbeast/testing/no_memory.h"
#include "libtorchbeast/testing/values.h"

// AddressSanitizer's own would not be released by the operator delete below.
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return torchbeast::testing::no_memory ? nullptr : std::malloc(size == 0 ? 1 : size);
}
void* operator new(std::size_t size) {
  void* data = operator new(size, std::nothrow);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void operator delete(void* data) noexcept { std::free(data); }
void operator delete(void* data, std::size_t) noexcept { std::free(data); }

namespace torchbeast {
namespace {

using testing::array_of;
using testing::message_of;
using testing::NoMemory;
using testing::same_bytes;
using testing::tuple;
using testing::values_of;

constexpr std::size_t kLarge = 4 * BufferPool::kMinPooledBytes;

// 0, 1, 2, ... plus an offset, in C order.
Array counted(Shape shape, std::int32_t offset = 0) {
  Array array(DType::kInt32, std::move(shape));
  std::iota(array.as<std::int32_t>(), array.as<std::int32_t>() + array.num_elements(), offset);
  return array;
}

Array joined(std::initializer_list<const Array*> parts, std::size_t dim, std::int64_t spare = 0) {
  const std::vector<const Array*> list(parts);
  return join(std::span<const Array* const>(list), dim, spare);
}

// Element [a, b, c] of an array of three dimensions.
std::int32_t at(const Array& array, std::int64_t a, std::int64_t b, std::int64_t c) {
  return array.as<std::int32_t>()[(a * array.size(1) + b) * array.size(2) + c];
}

// ---- Array -----------------------------------------------------------------------------------

TEST(ArrayTest, ACopySharesTheBytesAndACloneDoesNot) {
  const Array array = counted({2, 2});
  Array copy = array, clone = array.clone();
  EXPECT_EQ(copy.data(), array.data());
  EXPECT_NE(clone.data(), array.data());
  EXPECT_TRUE(same_bytes(clone, array));
}

TEST(ArrayTest, ADefaultArrayIsEmpty) {
  EXPECT_EQ(Array().num_bytes(), 0u);
  EXPECT_EQ(Array().shape(), Shape{0});
}

TEST(ArrayTest, AnArrayWithoutDimensionsHasOneElement) {
  EXPECT_EQ(Array::filled<float>({}, 3.0f).num_bytes(), 4u);
}

TEST(ArrayTest, ANegativeDimensionIsRefused) {
  EXPECT_EQ(message_of<std::invalid_argument>([] { Array(DType::kUInt8, {2, -1}); }),
            "dimensions must not be negative, got [2, -1]");
}

TEST(ArrayTest, ReadingAsAnotherTypeNamesBoth) {
  EXPECT_EQ(message_of<std::logic_error>([] { counted({1}).as<float>(); }),
            "array holds int32, not float32");
}

TEST(ArrayTest, AReshapedViewNeedsAsManyElements) {
  EXPECT_EQ(counted({2, 3}).reshaped({3, 2}).shape(), (Shape{3, 2}));
  EXPECT_EQ(message_of<std::invalid_argument>([] { counted({2, 3}).reshaped({4}); }),
            "cannot view shape [2, 3] as [4]");
}

TEST(ArrayTest, RowsShareTheBytesAndKeepThemAlive) {
  Array rows;
  {
    const Array array = counted({3, 2});
    rows = array.rows(1, 2);
    EXPECT_EQ(rows.data(), array.data() + 2 * sizeof(std::int32_t));
  }
  EXPECT_EQ(values_of<std::int32_t>(rows), (std::vector<std::int32_t>{2, 3, 4, 5}));
}

TEST(ArrayTest, RowsOutsideAreRefused) {
  const Array array = counted({3, 2});
  for (const auto& [start, length] : {std::pair{2, 2}, {-1, 1}, {0, -1}, {4, 0}}) {
    EXPECT_THROW(array.rows(start, length), std::invalid_argument) << start << " " << length;
  }
  EXPECT_THROW(Array::filled<float>({}, 0).rows(0, 1), std::invalid_argument);
  EXPECT_EQ(array.rows(3, 0).num_bytes(), 0u);
}

TEST(ArrayTest, ASpecHasNoBytes) {
  const Array spec = Array::spec(DType::kFloat64, {1 << 20, 1 << 10});
  EXPECT_EQ(spec.data(), nullptr);
  EXPECT_EQ(spec.num_bytes(), std::size_t{8} << 30);
}

// ---- join ------------------------------------------------------------------------------------

TEST(JoinTest, JoiningIsConcatenationAlongEachDimension) {
  for (std::size_t dim = 0; dim < 3; ++dim) {
    Shape other{2, 3, 4};
    other[dim] = 5;
    const Array a = counted({2, 3, 4}), b = counted(other, 1000);
    const Array c = joined({&a, &b}, dim);
    ASSERT_EQ(c.size(dim), a.size(dim) + 5);
    int compared = 0;
    for (std::int64_t i = 0; i < c.size(0); ++i) {
      for (std::int64_t j = 0; j < c.size(1); ++j) {
        for (std::int64_t k = 0; k < c.size(2); ++k, ++compared) {
          std::int64_t index[3] = {i, j, k};
          const bool in_b = index[dim] >= a.size(dim);
          if (in_b) index[dim] -= a.size(dim);
          EXPECT_EQ(at(c, i, j, k), at(in_b ? b : a, index[0], index[1], index[2]));
        }
      }
    }
    EXPECT_EQ(compared, a.num_elements() + b.num_elements());
  }
}

TEST(JoinTest, OneArrayIsNotCopied) {
  const Array array = counted({2, 3});
  EXPECT_EQ(joined({&array}, 1).data(), array.data());
}

TEST(JoinTest, EmptyPartsAddNothing) {
  const Array a = counted({2, 0, 3}), b = counted({2, 2, 3});
  EXPECT_TRUE(same_bytes(joined({&a, &b, &a}, 1), b));
}

TEST(JoinTest, SpareEntriesFollowTheJoinedOnesInEachDimension) {
  for (std::size_t dim = 0; dim < 3; ++dim) {
    for (const std::int64_t spare : {1, 7}) {
      Shape other{2, 3, 4};
      other[dim] = 5;
      const Array a = counted({2, 3, 4}), b = counted(other, 1000);
      const Array c = joined({&a, &b}, dim, spare);
      ASSERT_EQ(c.size(dim), a.size(dim) + 5 + spare);
      int compared = 0;
      for (std::int64_t i = 0; i < c.size(0); ++i) {
        for (std::int64_t j = 0; j < c.size(1); ++j) {
          for (std::int64_t k = 0; k < c.size(2); ++k) {
            std::int64_t index[3] = {i, j, k};
            if (index[dim] >= a.size(dim) + 5) continue;
            const bool in_b = index[dim] >= a.size(dim);
            if (in_b) index[dim] -= a.size(dim);
            EXPECT_EQ(at(c, i, j, k), at(in_b ? b : a, index[0], index[1], index[2]));
            ++compared;
          }
        }
      }
      EXPECT_EQ(compared, a.num_elements() + b.num_elements());
    }
  }
}

TEST(JoinTest, OneArrayWithSpareEntriesIsCopied) {
  const Array array = counted({2, 3});
  Array c = joined({&array}, 1, 1);
  EXPECT_TRUE(same_bytes(narrow(c, 1, 0, 3), array));
  std::memset(c.data(), 0xff, c.num_bytes());
  EXPECT_TRUE(same_bytes(array, counted({2, 3})));
}

TEST(JoinTest, SpareEntriesAreThereEvenIfNothingIsJoined) {
  const Array empty = counted({2, 0, 3});
  EXPECT_EQ(joined({&empty}, 1, 4).shape(), (Shape{2, 4, 3}));
}

TEST(JoinTest, JoinableMeansSameDtypeAndSameShapeElsewhere) {
  const Array a = counted({2, 3, 4});
  EXPECT_TRUE(joinable(a, counted({2, 9, 4}), 1));
  EXPECT_FALSE(joinable(a, counted({2, 9, 4}), 2));
  EXPECT_FALSE(joinable(a, counted({2, 3}), 1));
  EXPECT_FALSE(joinable(a, Array::zeros(DType::kFloat32, {2, 3, 4}), 1));
}

TEST(JoinTest, NestsAreJoinedLeafByLeaf) {
  const ArrayNest a(ArrayNest::Map{{"x", counted({1, 1})}, {"y", tuple({counted({1, 2})})}});
  const ArrayNest b(ArrayNest::Map{{"x", counted({1, 2}, 5)}, {"y", tuple({counted({1, 2}, 7)})}});
  const std::vector<const ArrayNest*> nests{&a, &b};
  const ArrayNest c = join(std::span<const ArrayNest* const>(nests), 1);
  EXPECT_TRUE(same_bytes(
      c, ArrayNest(ArrayNest::Map{{"x", array_of<std::int32_t>({1, 3}, {0, 5, 6})},
                                  {"y", tuple({array_of<std::int32_t>({1, 4}, {0, 1, 7, 8})})}})));
}

TEST(JoinTest, NestsWithoutALeafAreJoinedToTheSame) {
  const ArrayNest empty;
  const std::vector<const ArrayNest*> nests{&empty, &empty};
  EXPECT_TRUE(same_bytes(join(std::span<const ArrayNest* const>(nests), 1), empty));
}

// ---- narrow and repeat -----------------------------------------------------------------------

TEST(NarrowTest, NarrowingUndoesJoining) {
  for (std::size_t dim = 0; dim < 3; ++dim) {
    Shape other{2, 3, 4};
    other[dim] = 5;
    const Array a = counted({2, 3, 4}), b = counted(other, 1000);
    const Array both = joined({&a, &b}, dim);
    EXPECT_TRUE(same_bytes(narrow(both, dim, 0, a.size(dim)), a)) << dim;
    EXPECT_TRUE(same_bytes(narrow(both, dim, a.size(dim), 5), b)) << dim;
  }
}

TEST(NarrowTest, NothingIsCopiedWhereTheBytesAreContiguous) {
  const Array array = counted({1, 4, 2});
  EXPECT_EQ(narrow(array, 1, 0, 4).data(), array.data());
  EXPECT_EQ(narrow(array, 1, 2, 1).data(), array.data() + 4 * sizeof(std::int32_t));
  EXPECT_EQ(narrow(array, 1, 2, 1).shape(), (Shape{1, 1, 2}));
}

TEST(NarrowTest, APartOutsideIsRefusedInEveryDimension) {
  const Array array = counted({2, 3, 4});
  for (std::size_t dim = 0; dim < 3; ++dim) {
    EXPECT_THROW(narrow(array, dim, 1, array.size(dim)), std::invalid_argument) << dim;
    EXPECT_THROW(narrow(array, dim, -1, 1), std::invalid_argument) << dim;
    EXPECT_THROW(narrow(array, dim, 0, -1), std::invalid_argument) << dim;
  }
}

TEST(NarrowTest, ADimensionThatIsNotThereIsRefused) {
  EXPECT_THROW(narrow(Array::filled<float>({}, 1), 1, 0, 1), std::out_of_range);
  EXPECT_THROW(narrow(counted({2}), 1, 0, 1), std::out_of_range);
}

TEST(NarrowTest, EmptyPartsHaveTheirShape) {
  EXPECT_EQ(narrow(counted({2, 3}), 1, 1, 0).shape(), (Shape{2, 0}));
  EXPECT_EQ(narrow(counted({0, 3}), 1, 1, 2).shape(), (Shape{0, 2}));
}

TEST(RepeatTest, RepeatingGivesCopiesSideBySide) {
  const Array array = array_of<std::int32_t>({2, 1}, {1, 2});
  EXPECT_TRUE(same_bytes(repeat(array, 1, 3), array_of<std::int32_t>({2, 3}, {1, 1, 1, 2, 2, 2})));
}

TEST(RepeatTest, RepeatingOnceIsACopyToo) {
  const Array array = counted({1, 1});
  EXPECT_NE(repeat(array, 1, 1).data(), array.data());
}

// ---- BufferPool ------------------------------------------------------------------------------

TEST(BufferPoolTest, BuffersAreAlignedToACacheLine) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{63}, kLarge + 1}) {
    const auto buffer = BufferPool::instance().allocate(size);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.get()) % BufferPool::kAlignment, 0u);
  }
}

TEST(BufferPoolTest, ALargeBufferThatWasLetGoIsTakenAgain) {
  BufferPool& pool = BufferPool::instance();
  auto buffer = pool.allocate(kLarge);
  const std::byte* const address = buffer.get();
  const std::size_t idle = pool.idle_bytes();
  buffer.reset();
  EXPECT_EQ(pool.idle_bytes(), idle + kLarge);
  EXPECT_EQ(pool.allocate(kLarge).get(), address);
}

TEST(BufferPoolTest, ABufferInUseIsNeverHandedOutTwice) {
  BufferPool& pool = BufferPool::instance();
  const auto first = pool.allocate(kLarge), second = pool.allocate(kLarge);
  EXPECT_NE(first.get(), second.get());
}

TEST(BufferPoolTest, SmallBuffersAreNotKept) {
  BufferPool& pool = BufferPool::instance();
  const std::size_t idle = pool.idle_bytes();
  pool.allocate(BufferPool::kMinPooledBytes - 1).reset();
  EXPECT_EQ(pool.idle_bytes(), idle);
}

TEST(BufferPoolTest, IdleMemoryHasALimit) {
  BufferPool pool;
  pool.allocate(BufferPool::kMaxIdleBytes + 1).reset();
  EXPECT_EQ(pool.idle_bytes(), 0u);
}

TEST(BufferPoolTest, IdleMemoryOfManySizesHasALimitToo) {
  BufferPool pool(10 * kLarge);
  for (std::size_t size = kLarge; size < 4 * kLarge; size += 1000) {
    pool.allocate(size).reset();
    EXPECT_LE(pool.idle_bytes(), 10 * kLarge);
  }
  EXPECT_GT(pool.idle_bytes(), 6 * kLarge) << "what has room is kept";
}

TEST(BufferPoolTest, ABufferServesArraysOfNearlyItsSize) {
  BufferPool pool;
  pool.allocate(kLarge - 100).reset();
  const std::size_t idle = pool.idle_bytes();
  EXPECT_LE(idle, kLarge + kLarge / 8);
  const auto buffer = pool.allocate(kLarge - 1);
  EXPECT_EQ(pool.idle_bytes(), 0u) << "it is in use again";
}

TEST(BufferPoolTest, ABufferBelowAMegabyteHasAtMostAnEighthMoreThanWasAskedFor) {
  for (std::size_t size = BufferPool::kMinPooledBytes; size < 40'000; size += 61) {
    BufferPool pool;
    pool.allocate(size).reset();
    EXPECT_GE(pool.idle_bytes(), size);
    EXPECT_LE(pool.idle_bytes(), size + size / 8);
  }
}

TEST(BufferPoolTest, AHugeBufferServesArraysThatAreUpToAFifthSmaller) {
  BufferPool pool;
  pool.allocate(4 * BufferPool::kHugeBytes + 1).reset();
  EXPECT_EQ(pool.idle_bytes(), 5 * BufferPool::kHugeBytes);
  const auto batch = pool.allocate(5 * BufferPool::kHugeBytes);
  EXPECT_EQ(pool.idle_bytes(), 0u) << "it is in use again";
}

TEST(BufferPoolTest, ASizeThatCannotBeRoundedUpIsOutOfMemory) {
  EXPECT_THROW(BufferPool().allocate(SIZE_MAX - 1), std::bad_alloc);
}

TEST(BufferPoolTest, OfBuffersUsedInTurnOneIsIdleHoweverLargeTheyAre) {
  BufferPool pool(kLarge);
  auto used = pool.allocate(8 * kLarge), next = pool.allocate(8 * kLarge);
  const std::byte* const addresses[] = {used.get(), next.get()};
  for (int turn = 0; turn < 6; ++turn) {
    used = std::move(next);
    EXPECT_EQ(pool.idle_bytes(), 8 * kLarge) << turn;
    next = pool.allocate(8 * kLarge);
    EXPECT_EQ(next.get(), addresses[turn % 2]) << turn;
  }
}

TEST(BufferPoolTest, IdleMemoryIsLimitedByTheMemoryInUse) {
  BufferPool pool(kLarge);
  auto used = pool.allocate(4 * kLarge);
  {
    const auto first = pool.allocate(4 * kLarge), second = pool.allocate(4 * kLarge);
  }
  EXPECT_EQ(pool.idle_bytes(), 4 * kLarge) << "the second would be 3 kLarge above the limit";
  const auto small = pool.allocate(kLarge);
  pool.allocate(2 * kLarge).reset();
  EXPECT_EQ(pool.idle_bytes(), 6 * kLarge) << "5 in use, and 1";
  pool.allocate(kLarge / 2).reset();
  EXPECT_EQ(pool.idle_bytes(), 6 * kLarge) << "the limit is reached";
}

TEST(BufferPoolTest, ABufferThatNoListHasMemoryForIsFreed) {
  BufferPool pool;
  auto buffer = pool.allocate(kLarge);
  {
    const NoMemory scope;
    buffer.reset();
  }
  EXPECT_EQ(pool.idle_bytes(), 0u);
}

TEST(BufferPoolTest, NewMemoryFreesSizesThatNobodyAsksForAnyMore) {
  BufferPool pool(BufferPool::kMaxIdleBytes, Clock::duration::zero());
  {
    const auto first = pool.allocate(kLarge), second = pool.allocate(kLarge);
  }
  const auto same = pool.allocate(kLarge);
  EXPECT_EQ(pool.idle_bytes(), kLarge) << "a buffer that is taken again is not new memory";
  pool.allocate(2 * kLarge).reset();
  EXPECT_EQ(pool.idle_bytes(), 2 * kLarge) << "the new size alone";
}

TEST(BufferPoolTest, SizesThatWereAskedForOfLateAreKept) {
  BufferPool pool(2 * kLarge);
  {
    const auto first = pool.allocate(kLarge), second = pool.allocate(kLarge);
  }
  pool.allocate(2 * kLarge).reset();
  const auto first = pool.allocate(kLarge), second = pool.allocate(kLarge);
  EXPECT_EQ(pool.idle_bytes(), 0u) << "both came from the pool";
}

TEST(BufferPoolTest, ARetiredPoolKeepsNothing) {
  BufferPool pool;
  auto from_before = pool.allocate(kLarge);
  pool.retire();
  from_before.reset();
  pool.allocate(kLarge).reset();
  EXPECT_EQ(pool.idle_bytes(), 0u);
}

TEST(BufferPoolTest, ThreadsNeverShareABuffer) {
  std::vector<std::thread> threads;
  std::atomic<int> mistakes = 0;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([thread, &mistakes] {
      for (int i = 0; i < 200; ++i) {
        const Array array = Array::filled<std::int32_t>({2048}, thread);
        for (const std::int32_t value : values_of<std::int32_t>(array)) {
          mistakes += value != thread;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mistakes, 0);
}

}  // namespace
}  // namespace torchbeast
