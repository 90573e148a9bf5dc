// SPDX-License-Identifier: Apache-2.0
// Environment servers inside the test process: a real one, and one that follows a script.

#pragma once

#include <grpcpp/grpcpp.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "libtorchbeast/proto/service.h"
#include "libtorchbeast/server/env_server.h"
#include "libtorchbeast/stream/endpoint.h"
#include "libtorchbeast/testing/threads.h"

namespace torchbeast::testing {

// A temporary folder for the addresses of one test.
class TestFolder {
 public:
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "torchbeast-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
    path_ = name;
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  TestFolder& operator=(const TestFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string address(int number = 0) const {
    return "unix:" + (path_ / std::to_string(number)).string();
  }

 private:
  std::filesystem::path path_;
};

// An EnvServer that runs from construction to destruction.
class RunningServer {
 public:
  RunningServer(EnvFactory factory, Endpoint endpoint, EnvServerOptions options = {})
      : server_(std::move(factory), std::move(endpoint), std::move(options)),
        run_([this] { server_.run(); }) {
    const Patience patience;
    if (!server_.wait_until_serving(kPatience)) patience.die("a server coming up");
  }
  ~RunningServer() { stop(); }
  RunningServer(const RunningServer&) = delete;
  RunningServer& operator=(const RunningServer&) = delete;

  void stop() {
    if (std::exchange(stopped_, true)) return;
    server_.stop();
    run_.get();
  }

  EnvServer& server() { return server_; }

 private:
  EnvServer server_;
  Background<void> run_;
  bool stopped_ = false;
};

// Serves gRPC's own kind of service.
inline std::unique_ptr<grpc::Server> serve(const Endpoint& endpoint, grpc::Service* service,
                                           std::chrono::milliseconds max_idle = kMaxIdle) {
  grpc::ServerBuilder builder;
  builder.RegisterService(service);
  return start_server(endpoint, &builder, max_idle);
}

using VectorCall = grpc::ServerReaderWriter<rpcenv::VectorStep, rpcenv::VectorAction>;
using OriginalCall = grpc::ServerReaderWriter<rpcenv::Step, rpcenv::Action>;

// The answers of a ScriptedServer. Calls without a script are unimplemented.
struct Script {
  std::function<grpc::Status(rpcenv::Description*)> describe = {};
  std::function<grpc::Status(VectorCall*)> vector_stream = {};
  std::function<grpc::Status(OriginalCall*)> original_stream = {};
};

// A server that sends what a test tells it to send.
class ScriptedServer {
 public:
  ScriptedServer(Script script, const std::string& address)
      : service_(std::move(script)), server_(serve(address, &service_)) {}
  ~ScriptedServer() { server_->Shutdown(std::chrono::system_clock::now()); }
  ScriptedServer(const ScriptedServer&) = delete;
  ScriptedServer& operator=(const ScriptedServer&) = delete;

 private:
  class Service final : public rpcenv::RPCEnvServer::Service {
   public:
    explicit Service(Script script) : script_(std::move(script)) {}

    grpc::Status StreamingEnv(grpc::ServerContext*, OriginalCall* stream) override {
      return script_.original_stream ? script_.original_stream(stream) : unknown();
    }
    grpc::Status StreamingVectorEnv(grpc::ServerContext*, VectorCall* stream) override {
      return script_.vector_stream ? script_.vector_stream(stream) : unknown();
    }
    grpc::Status Describe(grpc::ServerContext*, const rpcenv::DescribeRequest*,
                          rpcenv::Description* message) override {
      return script_.describe ? script_.describe(message) : unknown();
    }

   private:
    static grpc::Status unknown() { return {grpc::StatusCode::UNIMPLEMENTED, "no such call"}; }

    const Script script_;
  };

  Service service_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace torchbeast::testing
