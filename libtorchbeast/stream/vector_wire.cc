// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/vector_wire.h"

#include "libtorchbeast/proto/array_codec.h"
#include "rpcenv.grpc.pb.h"

namespace torchbeast {
namespace {

class VectorWire final : public Wire {
 public:
  VectorWire(const std::shared_ptr<grpc::Channel>& channel, const Credentials& credentials)
      : Wire(credentials), stub_(rpcenv::RPCEnvServer::NewStub(channel)) {}

  bool start(std::uint64_t seed) override {
    stream_ = stub_->StreamingVectorEnv(&context_);
    action_.set_seed(seed);
    return stream_->Write(action_);
  }

  bool write(const ArrayNest& action) override {
    action_.Clear();
    codec::encode(without_leading(action, 1), action_.mutable_nest_action());
    return stream_->Write(action_);
  }

  std::optional<RawStep> read() override {
    if (!stream_->Read(&step_)) return std::nullopt;
    RawStep raw{.observation = codec::decode(step_.observation()),
                .reward = codec::decode(step_.reward()),
                .terminated = codec::decode(step_.terminated()),
                .truncated = codec::decode(step_.truncated()),
                .episode_end = codec::decode(step_.episode_end()),
                .episode_step = codec::decode(step_.episode_step()),
                .episode_return = codec::decode(step_.episode_return())};
    if (step_.has_final_observation()) {
      raw.final_observation = codec::decode(step_.final_observation());
    }
    return raw;
  }

  void half_close() override { stream_->WritesDone(); }
  grpc::Status finish() override { return drained_status(stream_.get(), &step_); }

 private:
  std::unique_ptr<rpcenv::RPCEnvServer::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::VectorAction, rpcenv::VectorStep>> stream_;
  rpcenv::VectorAction action_;  // messages are reused, and with them their memory
  rpcenv::VectorStep step_;
};

}  // namespace

std::unique_ptr<Wire> make_vector_wire(const std::shared_ptr<grpc::Channel>& channel,
                                       const Credentials& credentials) {
  return std::make_unique<VectorWire>(channel, credentials);
}

}  // namespace torchbeast
