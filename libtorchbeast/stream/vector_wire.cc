// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/vector_wire.h"

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/service.h"

namespace torchbeast {
namespace {

class VectorWire final : public ClientWire {
 public:
  VectorWire(const std::shared_ptr<grpc::Channel>& channel, const Credentials& credentials)
      : ClientWire(credentials), stub_(rpcenv::RPCEnvServer::NewStub(channel)) {}

  bool start(std::uint64_t seed) override {
    stream_ = stub_->StreamingVectorEnv(&context_);
    action_.set_seed(seed);
    return send();
  }

  bool write(const ArrayNest& action) override {
    codec::encode(without_leading(action, 1), action_.mutable_nest_action());
    return send();
  }

  void give_options(const std::string& json) override { action_.set_env_options(json); }

  std::optional<RawStep> read() override {
    if (!stream_->Read(&step_)) return std::nullopt;
    return raw_step(step_);
  }

  void half_close() override { stream_->WritesDone(); }
  grpc::Status finish() override { return drained_status(stream_.get(), &step_); }

 private:
  bool send() {
    const bool is_sent = stream_->Write(action_);
    action_.Clear();
    return is_sent;
  }

  std::unique_ptr<rpcenv::RPCEnvServer::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::VectorAction, rpcenv::VectorStep>> stream_;
  rpcenv::VectorAction action_;  // messages are reused, and with them their memory
  rpcenv::VectorStep step_;
};

}  // namespace

RawStep raw_step(const rpcenv::VectorStep& message) {
  RawStep raw{.observation = codec::decode(message.observation()),
              .reward = codec::decode(message.reward()),
              .terminated = codec::decode(message.terminated()),
              .truncated = codec::decode(message.truncated()),
              .episode_end = codec::decode(message.episode_end()),
              .episode_step = codec::decode(message.episode_step()),
              .episode_return = codec::decode(message.episode_return())};
  if (message.has_final_observation()) {
    raw.final_observation = codec::decode(message.final_observation());
  }
  if (message.has_info()) raw.info = codec::decode(message.info());
  return raw;
}

std::unique_ptr<Wire> make_vector_wire(const std::shared_ptr<grpc::Channel>& channel,
                                       const Credentials& credentials) {
  return std::make_unique<VectorWire>(channel, credentials);
}

}  // namespace torchbeast
