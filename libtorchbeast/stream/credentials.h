// SPDX-License-Identifier: Apache-2.0
// Protects connections over TCP: TLS, and a token that every call carries.

#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <string>
#include <string_view>

namespace torchbeast {

// The credentials of one end of a connection, as the contents of files, not their names. All fields
// are empty where nothing is protected.
//
//   client  TLS if there is a ca or a certificate: the server's certificate must be signed by the
//           ca and name the host. Its own certificate is for servers that have a ca.
//   server  TLS if there is a certificate. With a ca, only clients with a certificate signed by it
//           are admitted; with a token, only calls that carry it, over TLS or not.
//
// Unix sockets use no TLS. These are secrets: nothing may print them.
struct Credentials {
  std::string ca = {};           // PEM: certificates of authorities
  std::string certificate = {};  // PEM: this end's, then any between it and the authority's
  std::string key = {};          // PEM: of the certificate, without a password
  std::string token = {};        // printable ASCII without spaces

  bool has_tls() const { return !ca.empty() || !certificate.empty(); }
};

// Throws std::invalid_argument, naming no secret, for a token that no call can carry and for a
// certificate without key.
void check(const Credentials& credentials);

// Compares in a time that depends on the length of `given`, not on how much of it is right.
bool equal_in_constant_time(std::string_view secret, std::string_view given);

// Adds the token, if there is one, to a call of a client: "authorization: Bearer TOKEN".
void add_token(const Credentials& credentials, grpc::ClientContext* context);

// Returns UNAUTHENTICATED, with advice for the client's user, unless the call of a client carries
// the server's token. OK if the server has none.
grpc::Status check_token(const Credentials& credentials, const grpc::ServerContext& context);

}  // namespace torchbeast
