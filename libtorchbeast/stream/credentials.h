// SPDX-License-Identifier: Apache-2.0
// Protects connections over TCP: TLS, and a token that every call carries.

#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>
#include <grpcpp/support/string_ref.h>

#include <map>
#include <string>
#include <string_view>

namespace torchbeast {

// The credentials of one end of a connection, as the contents of the files, not their names. If the
// connection is not protected, all fields are empty.
//
//   client  TLS if there is a ca or a certificate: the server's certificate must be signed by the
//           ca and name the host. Its own certificate is for servers that have a ca.
//   server  TLS if there is a certificate. With a ca, only clients with a certificate signed by it
//           are admitted; with a token, only calls that carry it, over TLS or not.
//
// Unix sockets do not use TLS. Credentials are secret: no code may print them.
struct Credentials {
  std::string ca = {};           // PEM: certificates of authorities
  std::string certificate = {};  // PEM: certificate of this end, then any intermediate ones
  std::string key = {};          // PEM: key of the certificate, without a password
  std::string token = {};        // printable ASCII without spaces

  bool has_tls() const { return !ca.empty() || !certificate.empty(); }
};

// Throws std::invalid_argument if no call can carry the token, or if there is a certificate without
// key. The message does not contain any secret.
void check(const Credentials& credentials);

// Compares in a time that depends on the length of `given`, but not on how much of it is correct.
bool equal_in_constant_time(std::string_view secret, std::string_view given);

// Adds the token, if there is one, to a client's call: "authorization: Bearer TOKEN".
void add_token(const Credentials& credentials, grpc::ClientContext* context);

// What gRPC knows of a client's call before any message of it: the headers.
using Headers = std::multimap<grpc::string_ref, grpc::string_ref>;

// Returns UNAUTHENTICATED, with advice for the client's user, unless the client's call carries the
// server's token. Returns OK if the server does not have a token.
grpc::Status check_token(const Credentials& credentials, const Headers& headers);

}  // namespace torchbeast
