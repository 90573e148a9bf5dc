// SPDX-License-Identifier: Apache-2.0
// Counts the fields of a peer's message before it is parsed. Every file that sends or receives
// messages of the protocol includes this before the generated service: "proto/service.h" does.
//
// An empty field takes 2 bytes in a message, and becomes an object of about 100 bytes. So without
// this check a message within the limit of 256 MiB could take 26 GiB before it could be validated.

#pragma once

#include <grpcpp/grpcpp.h>
#if __has_include(<grpcpp/impl/proto_utils.h>)
#include <grpcpp/impl/proto_utils.h>
#else  // before gRPC 1.53
#include <grpcpp/impl/codegen/proto_utils.h>
#endif

#include "rpcenv.pb.h"

namespace torchbeast::codec {

// The maximum number of fields in a message. An array in a dict has seven fields, and one for each
// dimension; no realistic observation has 50,000 such arrays.
inline constexpr int kMaxFields = 8 << 16;

// Returns whether a message of this type has at most `limit` fields; each number of a packed field
// counts as one. In malformed bytes, fields are counted up to the error.
bool has_few_fields(grpc::ByteBuffer* message, const google::protobuf::Descriptor* type,
                    int limit = kMaxFields);

// Serializes like gRPC, but rejects messages with too many fields as malformed.
template <typename Message>
struct CheckedParsing {
  static grpc::Status Serialize(const google::protobuf::MessageLite& message,
                                grpc::ByteBuffer* buffer, bool* own_buffer) {
    return grpc::GenericSerialize<grpc::ProtoBufferWriter, Message>(message, buffer, own_buffer);
  }
  static grpc::Status Deserialize(grpc::ByteBuffer* buffer,
                                  google::protobuf::MessageLite* message) {
    if (buffer != nullptr && !has_few_fields(buffer, Message::descriptor())) {
      buffer->Clear();
      return {grpc::StatusCode::INTERNAL, "the message has too many fields"};
    }
    return grpc::GenericDeserialize<grpc::ProtoBufferReader, Message>(buffer, message);
  }
};

}  // namespace torchbeast::codec

namespace grpc {

template <>
class SerializationTraits<rpcenv::Action, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::Action> {};
template <>
class SerializationTraits<rpcenv::Step, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::Step> {};
template <>
class SerializationTraits<rpcenv::VectorAction, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::VectorAction> {};
template <>
class SerializationTraits<rpcenv::VectorStep, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::VectorStep> {};
template <>
class SerializationTraits<rpcenv::HostMessage, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::HostMessage> {};
template <>
class SerializationTraits<rpcenv::Description, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::Description> {};
template <>
class SerializationTraits<rpcenv::DescribeRequest, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::DescribeRequest> {};
template <>
class SerializationTraits<rpcenv::StatusRequest, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::StatusRequest> {};
template <>
class SerializationTraits<rpcenv::ServerStatus, void>
    : public torchbeast::codec::CheckedParsing<rpcenv::ServerStatus> {};

}  // namespace grpc
