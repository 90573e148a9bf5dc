// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "health.grpc.pb.h"

namespace torchbeast {

// Answers health checks for a server that serves for as long as it lives. Needs no token.
//
// In place of gRPC's own service, whose calls have no limit: an open Watch costs the server 18 KiB,
// without a token. These calls count among all others, see start_server().
//
// Thread safety: every method may be called from any number of threads.
class HealthService final : public grpc::health::v1::Health::Service {
 public:
  explicit HealthService(std::vector<std::string> services) : services_(std::move(services)) {}

 private:
  grpc::Status Check(grpc::ServerContext*, const grpc::health::v1::HealthCheckRequest* request,
                     grpc::health::v1::HealthCheckResponse* response) override {
    response->set_status(grpc::health::v1::HealthCheckResponse::SERVING);
    for (const std::string& service : services_) {
      if (request->service() == service) return grpc::Status::OK;
    }
    if (request->service().empty()) return grpc::Status::OK;
    return {grpc::StatusCode::NOT_FOUND, "no such service"};
  }

  const std::vector<std::string> services_;
};

}  // namespace torchbeast
