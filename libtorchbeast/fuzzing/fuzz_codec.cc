// SPDX-License-Identifier: Apache-2.0
// Decodes bytes of a peer: they are refused with std::invalid_argument, or survive a round trip.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "libtorchbeast/fuzzing/expect.h"
#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/checked_parsing.h"
#include "libtorchbeast/proto/description.h"
#include "libtorchbeast/testing/values.h"

namespace torchbeast::fuzzing {
namespace {

constexpr int kFewFields = 8;

void check_nest(const rpcenv::ArrayNest& message) {
  ArrayNest decoded;
  if (!accepts([&] { decoded = codec::decode(message); })) return;
  std::size_t bytes = 0;
  nest::for_each([&](const Array& leaf) { bytes += leaf.num_bytes(); }, decoded);
  expect(bytes <= message.ByteSizeLong(), "arrays are no larger than the message they came in");
  rpcenv::ArrayNest again;
  codec::encode(decoded, &again);
  expect(testing::same_bytes(codec::decode(again), decoded),
         "a decoded nest survives a round trip");
}

void check_description(const rpcenv::Description& message) {
  EnvDescription decoded;
  if (!accepts([&] { decoded = codec::decode(message); })) return;
  rpcenv::Description again;
  codec::encode(decoded, &again);
  expect(accepts([&] { check_same(decoded, codec::decode(again)); }),
         "a decoded description survives a round trip");
}

// Returns the number of fields of a parsed message and of those in it, without the key and the
// value that every entry of a map has, sent or not.
int fields_of(const google::protobuf::Message& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  int count = reflection.GetUnknownFields(message).field_count();
  std::vector<const google::protobuf::FieldDescriptor*> set;
  reflection.ListFields(message, &set);
  for (const auto* field : set) {
    const int size = field->is_repeated() ? reflection.FieldSize(message, field) : 1;
    count += message.GetDescriptor()->options().map_entry() ? 0 : size;
    if (field->cpp_type() != google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) continue;
    for (int i = 0; i < size; ++i) {
      count += fields_of(field->is_repeated() ? reflection.GetRepeatedMessage(message, field, i)
                                              : reflection.GetMessage(message, field));
    }
  }
  return count;
}

template <typename Message>
bool parses(const std::uint8_t* data, std::size_t size, Message* message) {
  const grpc::Slice slice(data, size);
  grpc::ByteBuffer buffer(&slice, 1);
  const bool has_few = codec::has_few_fields(&buffer, Message::descriptor(), kFewFields);
  if (!message->ParseFromArray(data, static_cast<int>(size))) return false;
  expect(!has_few || fields_of(*message) <= kFewFields, "no field of a message goes uncounted");
  return true;
}

}  // namespace

// The first byte says as which message the others are read.
int test_one_input(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto* rest = data + 1;
  if (data[0] % 2 == 0) {
    rpcenv::ArrayNest message;
    if (parses(rest, size - 1, &message)) check_nest(message);
  } else {
    rpcenv::Description message;
    if (parses(rest, size - 1, &message)) check_description(message);
  }
  return 0;
}

}  // namespace torchbeast::fuzzing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  return torchbeast::fuzzing::test_one_input(data, size);
}
