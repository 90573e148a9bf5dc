// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/stream/credentials.h"

#include <algorithm>
#include <stdexcept>

namespace torchbeast {
namespace {

constexpr char kHeader[] = "authorization";
constexpr std::string_view kScheme = "Bearer ";

bool is_printable(char c) { return c > ' ' && c <= '~'; }

grpc::Status refused(const char* advice) { return {grpc::StatusCode::UNAUTHENTICATED, advice}; }

}  // namespace

void check(const Credentials& credentials) {
  if (!std::all_of(credentials.token.begin(), credentials.token.end(), is_printable)) {
    throw std::invalid_argument("a token must be printable ASCII without spaces");
  }
  if (credentials.certificate.empty() != credentials.key.empty()) {
    throw std::invalid_argument("a certificate needs its key, and a key its certificate");
  }
}

bool equal_in_constant_time(std::string_view secret, std::string_view given) {
  if (secret.empty()) return given.empty();
  // Volatile: the compiler must not end the loop at the first difference.
  volatile unsigned difference = secret.size() == given.size() ? 0 : 1;
  for (std::size_t i = 0; i < given.size(); ++i) {
    difference = difference | static_cast<unsigned char>(secret[i % secret.size()] ^ given[i]);
  }
  return difference == 0;
}

void add_token(const Credentials& credentials, grpc::ClientContext* context) {
  if (credentials.token.empty()) return;
  context->AddMetadata(kHeader, std::string(kScheme) + credentials.token);
}

grpc::Status check_token(const Credentials& credentials, const Headers& headers) {
  if (credentials.token.empty()) return grpc::Status::OK;
  if (headers.count(kHeader) != 1) {
    return refused("token required: pass --token_file with a copy of the other side's token file");
  }
  const grpc::string_ref value = headers.find(kHeader)->second;
  const std::string_view header(value.data(), value.size());
  if (header.starts_with(kScheme) &&
      equal_in_constant_time(credentials.token, header.substr(kScheme.size()))) {
    return grpc::Status::OK;
  }
  return refused(
      "this is not its token: --token_file must be a copy of the file that it was started with");
}

}  // namespace torchbeast
