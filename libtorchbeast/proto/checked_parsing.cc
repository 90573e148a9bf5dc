// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/proto/checked_parsing.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/coded_stream.h>

#include <cstdint>

namespace torchbeast::codec {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::io::CodedInputStream;

constexpr int kMaxDepth = 200;  // protobuf refuses deeper messages than 100

enum WireType : std::uint32_t { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

// Walks over the fields of a message, into messages in it, and past all other data.
class FieldCounter {
 public:
  FieldCounter(CodedInputStream* input, int limit) : input_(input), left_(limit) {}

  // Returns whether the fields of a message up to the input's limit are few enough. Stops where the
  // input is no message, as the parser will.
  bool has_few(const Descriptor* type, int depth) {
    while (const std::uint32_t tag = input_->ReadTag()) {
      if (--left_ < 0 || depth > kMaxDepth) return false;
      if (!pass(type->FindFieldByNumber(static_cast<int>(tag >> 3)), tag & 7, depth)) return false;
      if (is_over_) return true;
    }
    return true;
  }

 private:
  // Passes the value of a field, which is unknown if null. Returns whether it has few enough
  // fields.
  bool pass(const FieldDescriptor* field, std::uint32_t wire_type, int depth) {
    std::uint64_t value = 0;
    switch (wire_type) {
      case kVarint:
        is_over_ = !input_->ReadVarint64(&value);
        return true;
      case kFixed64:
        is_over_ = !input_->Skip(8);
        return true;
      case kFixed32:
        is_over_ = !input_->Skip(4);
        return true;
      case kLengthDelimited:
        return pass_delimited(field, depth);
      default:  // a group, which the protocol has none of
        return false;
    }
  }

  bool pass_delimited(const FieldDescriptor* field, int depth) {
    std::uint32_t length = 0;
    is_over_ = !input_->ReadVarint32(&length) || length > INT32_MAX;
    if (is_over_) return true;
    const int size = static_cast<int>(length);
    if (field != nullptr && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      const CodedInputStream::Limit outer = input_->PushLimit(size);
      const bool few = has_few(field->message_type(), depth + 1);
      is_over_ = is_over_ || input_->BytesUntilLimit() != 0;
      input_->PopLimit(outer);
      return few;
    }
    if (field != nullptr && field->is_packable()) left_ -= size;  // a number takes a byte at least
    is_over_ = !input_->Skip(size);
    return left_ >= 0;
  }

  CodedInputStream* const input_;
  std::int64_t left_;
  bool is_over_ = false;  // what follows is no part of a message
};

}  // namespace

bool has_few_fields(grpc::ByteBuffer* message, const Descriptor* type, int limit) {
  // A number of a packed field takes a byte at least, any other field more.
  if (message->Length() <= static_cast<std::size_t>(limit)) return true;
  grpc::ProtoBufferReader reader(message);
  CodedInputStream input(&reader);
  return FieldCounter(&input, limit).has_few(type, 0);
}

}  // namespace torchbeast::codec
