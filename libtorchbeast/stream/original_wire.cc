// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/original_wire.h"

#include <utility>

#include "libtorchbeast/proto/array_codec.h"
#include "libtorchbeast/proto/service.h"

namespace torchbeast {
namespace {

class OriginalWire final : public ClientWire {
 public:
  OriginalWire(const std::shared_ptr<grpc::Channel>& channel, const Credentials& credentials)
      : ClientWire(credentials), stub_(rpcenv::RPCEnvServer::NewStub(channel)) {}

  bool start(std::uint64_t) override {
    stream_ = stub_->StreamingEnv(&context_);
    return true;  // the server speaks first
  }

  bool write(const ArrayNest& action) override {
    action_.Clear();
    codec::encode(without_leading(action, 2), action_.mutable_nest_action());
    return stream_->Write(action_);
  }

  std::optional<RawStep> read() override {
    if (!stream_->Read(&step_)) return std::nullopt;
    // The first step has done set although no episode has ended.
    const bool is_first = std::exchange(first_, false);
    const bool end = step_.done() && !is_first;
    return RawStep{.observation = with_leading(codec::decode(step_.observation()), 1),
                   .reward = Array::filled<float>({1}, step_.reward()),
                   .terminated = Array::filled<bool>({1}, step_.done()),
                   .truncated = Array::filled<bool>({1}, false),
                   .episode_end = Array::filled<bool>({1}, end),
                   .episode_step = Array::filled<std::int32_t>({1}, step_.episode_step()),
                   .episode_return = Array::filled<float>({1}, step_.episode_return())};
  }

  void half_close() override { stream_->WritesDone(); }
  grpc::Status finish() override { return drained_status(stream_.get(), &step_); }

 private:
  std::unique_ptr<rpcenv::RPCEnvServer::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<rpcenv::Action, rpcenv::Step>> stream_;
  rpcenv::Action action_;
  rpcenv::Step step_;
  bool first_ = true;
};

}  // namespace

std::unique_ptr<Wire> make_original_wire(const std::shared_ptr<grpc::Channel>& channel,
                                         const Credentials& credentials) {
  return std::make_unique<OriginalWire>(channel, credentials);
}

}  // namespace torchbeast
