// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/proto/checked_parsing.h"

#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <set>
#include <string>

namespace torchbeast::codec {
namespace {

bool is_accepted(const std::string& bytes,
                 const google::protobuf::Descriptor* type = rpcenv::ArrayNest::descriptor()) {
  const grpc::Slice halves[] = {grpc::Slice(bytes.substr(0, bytes.size() / 2)),
                                grpc::Slice(bytes.substr(bytes.size() / 2))};
  grpc::ByteBuffer message(halves, 2);
  return has_few_fields(&message, type);
}

std::string repeated(const std::string& field, int times) {
  std::string bytes;
  for (int i = 0; i < times; ++i) bytes += field;
  return bytes;
}

std::string varint(std::size_t value) {
  std::string bytes;
  for (; value > 0x7F; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

// Returns a length-delimited field with this number.
std::string field(int number, const std::string& content) {
  return varint(static_cast<std::size_t>(number) << 3 | 2) + varint(content.size()) + content;
}

const std::string kUnknown("\x78\x80\x01", 3);  // field 15 with a number of two bytes

TEST(CheckedParsingTest, FieldsAreCountedOneByOne) {
  EXPECT_TRUE(is_accepted(repeated(kUnknown, kMaxFields)));
  EXPECT_FALSE(is_accepted(repeated(kUnknown, kMaxFields + 1)));
}

TEST(CheckedParsingTest, EmptyEntriesAreCounted) {
  EXPECT_TRUE(is_accepted(repeated(field(2, ""), kMaxFields)));
  EXPECT_FALSE(is_accepted(repeated(field(2, ""), kMaxFields + 1)));
}

TEST(CheckedParsingTest, FieldsInsideOfOthersAreCountedTogether) {
  const std::string half = repeated(kUnknown, kMaxFields / 2 - 1);
  EXPECT_TRUE(is_accepted(field(2, half) + field(2, half)));
  EXPECT_FALSE(is_accepted(field(2, half) + field(2, half) + kUnknown));
  const std::string entry = field(3, field(1, "key") + field(2, half));  // of a map
  EXPECT_FALSE(is_accepted(entry + entry));
  EXPECT_FALSE(is_accepted(field(1, repeated(kUnknown, kMaxFields)))) << "of an array";
}

TEST(CheckedParsingTest, EachNumberOfAShapeIsCounted) {
  const std::string shape = field(2, std::string(kMaxFields, '\1'));
  EXPECT_FALSE(is_accepted(field(1, shape + field(3, std::string(kMaxFields, '\0')))));
}

TEST(CheckedParsingTest, DataIsNotCounted) {
  const std::string data(4 * kMaxFields, '\x12');
  EXPECT_TRUE(is_accepted(field(1, field(3, data))));
  EXPECT_TRUE(is_accepted(field(15, data))) << "of an unknown field";
}

TEST(CheckedParsingTest, GroupsAreRefused) {
  EXPECT_FALSE(is_accepted("\x7B" + repeated(kUnknown, kMaxFields - 1)));
}

TEST(CheckedParsingTest, DeepNestingIsRefusedAndDoesNotOverflowTheStack) {
  std::string nest = field(1, field(3, std::string(4 * kMaxFields, 'x')));
  for (int i = 0; i < 1000; ++i) nest = field(2, nest);
  EXPECT_FALSE(is_accepted(nest));
}

// The parser refuses them, and has then taken what came before only.
TEST(CheckedParsingTest, MalformedBytesAreCountedUpToTheError) {
  const std::string most = repeated(kUnknown, kMaxFields);
  for (const std::string& end :
       {std::string("\x12"), std::string("\x12\x05"), std::string("\x00", 1), std::string("\x78"),
        std::string("\x79\x01"), field(2, "\x12\x05").substr(0, 3)}) {
    rpcenv::ArrayNest parsed;
    EXPECT_FALSE(parsed.ParseFromString(repeated(kUnknown, 2) + end));
    EXPECT_TRUE(is_accepted(repeated(kUnknown, kMaxFields - 2) + end)) << end.size();
  }
  EXPECT_FALSE(is_accepted(most + kUnknown + "\x12"));
}

template <typename Message>
class MessageOfTheProtocolTest : public ::testing::Test {};
using Messages = ::testing::Types<rpcenv::Action, rpcenv::Step, rpcenv::VectorAction,
                                  rpcenv::VectorStep, rpcenv::DescribeRequest, rpcenv::Description,
                                  rpcenv::StatusRequest, rpcenv::ServerStatus>;
TYPED_TEST_SUITE(MessageOfTheProtocolTest, Messages);

TYPED_TEST(MessageOfTheProtocolTest, IsParsedIfItHasFewFieldsOnly) {
  for (const bool has_few : {true, false}) {
    grpc::Slice slice(repeated(kUnknown, kMaxFields + !has_few));
    grpc::ByteBuffer message(&slice, 1);
    TypeParam parsed;
    const grpc::Status status =
        grpc::SerializationTraits<TypeParam>::Deserialize(&message, &parsed);
    EXPECT_EQ(status.ok(), has_few) << status.error_message();
    EXPECT_EQ(parsed.ByteSizeLong() > 0, has_few);
  }
}

TEST(CheckedParsingTest, AllMessagesOfTheServicesAreAmongThese) {
  const auto* file = rpcenv::Action::descriptor()->file();
  std::set<std::string> named,
      checked = {"Action",          "Step",          "VectorAction", "VectorStep", "Description",
                 "DescribeRequest", "StatusRequest", "ServerStatus", "HostMessage"};
  for (int s = 0; s < file->service_count(); ++s) {
    for (int m = 0; m < file->service(s)->method_count(); ++m) {
      named.insert(file->service(s)->method(m)->input_type()->name());
      named.insert(file->service(s)->method(m)->output_type()->name());
    }
  }
  EXPECT_EQ(named, checked);
}

}  // namespace
}  // namespace torchbeast::codec
