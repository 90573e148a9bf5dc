// SPDX-License-Identifier: Apache-2.0
//
// Arrays survive the wire, and nothing that a peer sends crashes, over-reads or allocates hugely.

#include "libtorchbeast/proto/array_codec.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

#include "libtorchbeast/testing/values.h"

namespace torchbeast {
namespace {

using testing::array_of;
using testing::message_of;
using testing::same_bytes;
using testing::tuple;

rpcenv::NDArray message(int dtype, std::initializer_list<std::int64_t> shape, std::string data) {
  rpcenv::NDArray result;
  result.set_dtype(dtype);
  for (const std::int64_t size : shape) result.add_shape(size);
  result.set_data(std::move(data));
  return result;
}

std::string decode_error(const rpcenv::NDArray& bad) {
  return message_of<std::invalid_argument>([&] { codec::decode(bad); });
}

ArrayNest sent(const ArrayNest& nest) {
  rpcenv::ArrayNest wire, received;
  codec::encode(nest, &wire);
  EXPECT_TRUE(received.ParseFromString(wire.SerializeAsString()));
  return codec::decode(received);
}

// A vector in a vector in a vector ... around one array.
rpcenv::ArrayNest deep(std::size_t levels) {
  rpcenv::ArrayNest result;
  rpcenv::ArrayNest* innermost = &result;
  for (std::size_t i = 0; i < levels; ++i) innermost = innermost->add_vector();
  *innermost->mutable_array() = message(2, {}, "x");
  return result;
}

ArrayNest observation() {
  return ArrayNest(ArrayNest::Map{
      {"frame", ArrayNest(array_of<std::uint8_t>({2, 1, 3}, {0, 1, 127, 128, 254, 255}))},
      {"state", tuple({array_of<float>({2}, {-1.5f, 2.0f}), array_of<bool>({}, {true})})}});
}

TEST(ArrayCodecTest, NestsSurviveTheWire) {
  EXPECT_TRUE(same_bytes(sent(observation()), observation()));
}

TEST(ArrayCodecTest, EveryDtypeSurvivesTheWireUnderNumpysNumber) {
  int compared = 0;
  for (const DTypeInfo& entry : kDTypes) {
    const Array array = Array::zeros(entry.dtype, {2, 3});
    rpcenv::NDArray wire;
    codec::encode(array, &wire);
    EXPECT_EQ(wire.dtype(), static_cast<int>(entry.dtype));
    EXPECT_EQ(wire.data().size(), 6 * entry.item_size);
    EXPECT_TRUE(same_bytes(codec::decode(wire), array));
    ++compared;
  }
  EXPECT_EQ(compared, 12);
}

TEST(ArrayCodecTest, TheBytesOnTheWireAreTheseAndMayNeverChange) {
  rpcenv::NDArray wire;
  codec::encode(array_of<std::int64_t>({1, 1}, {5}), &wire);
  EXPECT_EQ(wire.SerializeAsString(),
            std::string("\x08\x07\x12\x02\x01\x01\x1a\x08\x05\0\0\0\0\0\0\0", 16));
}

TEST(ArrayCodecTest, ArraysWithoutElementsAndWithoutDimensionsSurvive) {
  EXPECT_TRUE(
      same_bytes(sent(Array(DType::kFloat32, {0, 3})).as_leaf(), Array(DType::kFloat32, {0, 3})));
  EXPECT_TRUE(same_bytes(sent(array_of<float>({}, {2})).as_leaf(), array_of<float>({}, {2})));
}

TEST(ArrayCodecTest, ASpecCarriesDtypeAndShapeOnly) {
  rpcenv::ArrayNest wire;
  codec::encode_spec(ArrayNest(Array::spec(DType::kUInt8, {4, 84, 84})), &wire);
  EXPECT_TRUE(wire.array().data().empty());
  const Array spec = codec::decode_spec(wire).as_leaf();
  EXPECT_EQ(spec.dtype(), DType::kUInt8);
  EXPECT_EQ(spec.shape(), (Shape{4, 84, 84}));
}

TEST(ArrayCodecTest, AnEmptyTupleOrDictCannotBeSent) {
  for (const ArrayNest& nest : {tuple({}), ArrayNest(ArrayNest::Map{}), tuple({tuple({})})}) {
    rpcenv::ArrayNest wire;
    EXPECT_EQ(message_of<std::invalid_argument>([&] { codec::encode(nest, &wire); }),
              "an empty tuple or dict cannot be sent: the wire format has none");
  }
}

TEST(ArrayCodecTest, AnArrayIsReadBeforeAVectorAndAVectorBeforeAMap) {
  rpcenv::ArrayNest wire;
  *(*wire.mutable_map())["a"].mutable_array() = message(2, {}, "m");
  EXPECT_TRUE(codec::decode(wire).is_map());
  *wire.add_vector()->mutable_array() = message(2, {}, "v");
  EXPECT_TRUE(codec::decode(wire).is_vector());
  *wire.mutable_array() = message(2, {}, "a");
  EXPECT_TRUE(codec::decode(wire).is_leaf());
}

// ---- Hostile messages ------------------------------------------------------------------------

TEST(ArrayCodecTest, UnknownDtypesAndObjectArraysAreRefused) {
  for (const int dtype : {-1, 9, 10, 13, 17, 22, 24, std::numeric_limits<int>::max()}) {
    EXPECT_EQ(decode_error(message(dtype, {1}, "12345678")),
              "array has dtype number " + std::to_string(dtype) +
                  ", expected one of bool, (u)int8 to 64, float16 to 64 (0 to 8, 11, 12, 23)");
  }
}

TEST(ArrayCodecTest, NegativeDimensionsAreRefused) {
  for (const std::int64_t size : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::min()}) {
    EXPECT_EQ(decode_error(message(2, {size}, "")),
              "array dimension " + std::to_string(size) +
                  " is negative or makes the array larger than a message may be");
  }
  EXPECT_THROW(codec::decode(message(2, {-1, -1}, "x")), std::invalid_argument);
}

TEST(ArrayCodecTest, DimensionsWhoseProductOverflowsAreRefused) {
  constexpr std::int64_t kHuge = std::int64_t{1} << 32;
  for (const auto& shape : {std::initializer_list<std::int64_t>{kHuge, kHuge},
                            {std::numeric_limits<std::int64_t>::max(), 2},
                            {1 << 20, 1 << 20},
                            {3, kHuge * (kHuge / 4), 4}}) {
    EXPECT_THROW(codec::decode(message(2, shape, "")), std::invalid_argument);
  }
}

TEST(ArrayCodecTest, AZeroDoesNotHideDimensionsThatOverflowWithoutIt) {
  constexpr std::int64_t kLarge = 1 << 28;
  EXPECT_THROW(codec::decode(message(2, {0, kLarge, kLarge, kLarge}, "")), std::invalid_argument);
  EXPECT_THROW(codec::decode(message(2, {kLarge, kLarge, kLarge, 0}, "")), std::invalid_argument);
  rpcenv::ArrayNest spec;
  *spec.mutable_array() = message(2, {0, kLarge, kLarge, kLarge}, "");
  EXPECT_THROW(codec::decode_spec(spec), std::invalid_argument);
}

TEST(ArrayCodecTest, AWrongNumberOfBytesIsRefusedWithBothSides) {
  EXPECT_EQ(decode_error(message(11, {2}, "1234567")),
            "array of shape [2] and dtype float32 needs 8 bytes, got 7");
  EXPECT_EQ(decode_error(message(11, {2}, "123456789")),
            "array of shape [2] and dtype float32 needs 8 bytes, got 9");
  EXPECT_EQ(decode_error(message(2, {0}, "1")),
            "array of shape [0] and dtype uint8 needs 0 bytes, got 1");
  EXPECT_EQ(decode_error(message(2, {}, "")),
            "array of shape [] and dtype uint8 needs 1 bytes, got 0");
  EXPECT_THROW(codec::decode(rpcenv::NDArray()), std::invalid_argument);
}

TEST(ArrayCodecTest, ALargePromiseWithoutTheBytesAllocatesNothing) {
  const std::size_t idle = BufferPool::instance().idle_bytes();
  EXPECT_THROW(codec::decode(message(12, {codec::kMaxMessageBytes}, "")), std::invalid_argument);
  EXPECT_EQ(BufferPool::instance().idle_bytes(), idle);
}

TEST(ArrayCodecTest, TooManyDimensionsAreRefused) {
  rpcenv::NDArray array = message(2, {}, "x");
  for (int i = 0; i < codec::kMaxDimensions; ++i) array.add_shape(1);
  EXPECT_EQ(codec::decode(array).ndim(), static_cast<std::size_t>(codec::kMaxDimensions));
  array.add_shape(1);
  EXPECT_EQ(decode_error(array), "array has 33 dimensions, expected at most 32");
}

TEST(ArrayCodecTest, NestingIsAcceptedToTheStatedDepthAndNoDeeper) {
  EXPECT_EQ(nest::flatten(codec::decode(deep(nest::kMaxDepth))).size(), 1u);
  for (const std::size_t levels : {nest::kMaxDepth + 1, std::size_t{2'000}}) {
    EXPECT_EQ(message_of<std::invalid_argument>([&] { codec::decode(deep(levels)); }),
              "arrays are nested deeper than 256 levels");
  }
}

TEST(ArrayCodecTest, ANestOfNothingIsRefused) {
  rpcenv::ArrayNest inner;
  inner.add_vector();
  for (const rpcenv::ArrayNest& bad : {rpcenv::ArrayNest(), inner}) {
    EXPECT_EQ(message_of<std::invalid_argument>([&] { codec::decode(bad); }),
              "expected an array, a vector or a map of arrays, got none of them");
  }
}

TEST(ArrayCodecTest, AnyByteButZeroIsTrueAndStoredAsOne) {
  const Array array = codec::decode(message(0, {5}, std::string("\0\1\2\x80\xff", 5)));
  EXPECT_EQ(std::memcmp(array.data(), "\0\1\1\1\1", 5), 0);
}

TEST(ArrayCodecTest, NoMutationOfAMessageDoesAnythingButFailOrGiveASoundArray) {
  rpcenv::ArrayNest wire;
  codec::encode(observation(), &wire);
  const std::string original = wire.SerializeAsString();
#if GOOGLE_PROTOBUF_VERSION < 4022000  // later versions do not have it, and log elsewhere
  const google::protobuf::LogSilencer silencer;
#endif
  std::mt19937 random(20240601);
  int decoded = 0, refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = original;
    for (std::uint32_t edits = 1 + random() % 4; edits > 0 && !bytes.empty(); --edits) {
      const std::size_t at = random() % bytes.size();
      switch (random() % 3) {
        case 0:
          bytes[at] = static_cast<char>(random());
          break;
        case 1:
          bytes.erase(at, 1 + random() % 3);
          break;
        default:
          bytes.insert(at, 1, static_cast<char>(random()));
      }
    }
    rpcenv::ArrayNest message;
    if (!message.ParseFromString(bytes)) continue;
    try {
      const ArrayNest nest = codec::decode(message);
      EXPECT_TRUE(same_bytes(sent(nest), nest));
      ++decoded;
    } catch (const std::invalid_argument&) {
      ++refused;
    }
  }
  EXPECT_GT(decoded, 100);
  EXPECT_GT(refused, 100);
}

TEST(ArrayCodecTest, MoreArraysThanTheLimitAreRefused) {
  rpcenv::ArrayNest message;
  for (int i = 0; i < codec::kMaxArrays; ++i) {
    codec::encode(Array::filled<std::uint8_t>({1}, 1), message.add_vector()->mutable_array());
  }
  EXPECT_THROW(codec::decode(message), std::invalid_argument);
  message.mutable_vector()->RemoveLast();
  EXPECT_EQ(nest::flatten(codec::decode(message)).size(), codec::kMaxArrays - 1u);
}

}  // namespace
}  // namespace torchbeast
