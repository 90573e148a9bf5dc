// SPDX-License-Identifier: Apache-2.0
// Measures the upper limit of any transport over gRPC on this machine: messages of one size in one
// direction, actions of 128 bytes in the other, neither of them processed.
//
//   server process   <- action       client process, one thread per stream
//                    message ->
//
//   bare_grpc serve ADDRESS BYTES                     until it is killed
//   bare_grpc measure SECONDS STREAMS ADDRESS...      prints messages/s over all streams

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "libtorchbeast/proto/service.h"

namespace {

using rpcenv::VectorAction;
using rpcenv::VectorStep;
using Seconds = std::chrono::duration<double>;

constexpr std::size_t kActionBytes = 128;
constexpr Seconds kWarmUp{0.5};

void fill(std::size_t num_bytes, rpcenv::NDArray* array) {
  array->set_dtype(2);
  array->add_shape(static_cast<std::int64_t>(num_bytes));
  array->mutable_data()->assign(num_bytes, 'x');
}

class Server final : public rpcenv::RPCEnvServer::Service {
 public:
  explicit Server(std::size_t num_bytes) : num_bytes_(num_bytes) {}

  grpc::Status StreamingVectorEnv(
      grpc::ServerContext*, grpc::ServerReaderWriter<VectorStep, VectorAction>* stream) override {
    VectorAction action;
    VectorStep step;
    while (stream->Read(&action)) {
      step.Clear();
      fill(num_bytes_, step.mutable_observation()->mutable_array());
      if (!stream->Write(step)) break;
    }
    return grpc::Status::OK;
  }

 private:
  const std::size_t num_bytes_;
};

int serve(const std::string& address, std::size_t num_bytes) {
  Server service(num_bytes);
  grpc::ServerBuilder builder;
  builder.SetMaxReceiveMessageSize(-1);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  server->Wait();
  return 0;
}

// Sends actions and reads messages until told to stop.
void play(const std::string& address, const std::atomic<bool>& stop, std::atomic<long>* count) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  const auto channel =
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  const auto stub = rpcenv::RPCEnvServer::NewStub(channel);
  grpc::ClientContext context;
  const auto stream = stub->StreamingVectorEnv(&context);
  VectorAction action;
  VectorStep step;
  while (!stop) {
    action.Clear();
    fill(kActionBytes, action.mutable_nest_action()->mutable_array());
    if (!stream->Write(action) || !stream->Read(&step)) break;
    ++*count;
  }
  stream->WritesDone();
  stream->Finish();
}

int measure(Seconds seconds, int num_streams, const std::vector<std::string>& addresses) {
  std::atomic<bool> stop = false;
  std::atomic<long> count = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < num_streams; ++i) {
    const std::string& address = addresses[static_cast<std::size_t>(i) % addresses.size()];
    threads.emplace_back([&] { play(address, stop, &count); });
  }
  std::this_thread::sleep_for(kWarmUp);
  const long before = count;
  const auto began = std::chrono::steady_clock::now();
  std::this_thread::sleep_for(seconds);
  const Seconds took = std::chrono::steady_clock::now() - began;
  std::cout << static_cast<double>(count - before) / took.count() << std::endl;
  stop = true;
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.size() == 3 && args[0] == "serve") return serve(args[1], std::stoul(args[2]));
  if (args.size() >= 4 && args[0] == "measure") {
    return measure(Seconds(std::stod(args[1])), std::stoi(args[2]), {args.begin() + 3, args.end()});
  }
  std::cerr << "usage: bare_grpc serve ADDRESS BYTES | measure SECONDS STREAMS ADDRESS...\n";
  return 2;
}
