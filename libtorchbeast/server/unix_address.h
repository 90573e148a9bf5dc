// SPDX-License-Identifier: Apache-2.0
// Claims Unix socket addresses before gRPC binds them, because gRPC would silently take over an
// address that another process serves.

#pragma once

#include <string>

#include "libtorchbeast/stream/endpoint.h"

namespace torchbeast {

// The exclusive right to serve at a "unix:PATH" address. For other addresses it does nothing.
//
// Construction removes a socket file that is no longer served; destruction removes this server's
// own file. If several claims are made at the same time, in one process or in several, exactly one
// of them succeeds. (This holds on Linux; elsewhere, only a server that is already listening is
// detected.)
class UnixAddressClaim {
 public:
  // Throws ConnectionError, naming the address, if it is served or claimed already, if a file of
  // another kind is there, if its folder is missing, or if the path is empty or too long for a
  // socket.
  explicit UnixAddressClaim(const Endpoint& endpoint);
  ~UnixAddressClaim();
  UnixAddressClaim(const UnixAddressClaim&) = delete;
  UnixAddressClaim& operator=(const UnixAddressClaim&) = delete;

 private:
  std::string path_;  // empty if it is not a Unix address
  int lock_ = -1;     // a socket that stays bound for the life of the claim
};

}  // namespace torchbeast
