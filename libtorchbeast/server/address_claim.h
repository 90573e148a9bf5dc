// SPDX-License-Identifier: Apache-2.0
// Claims an address for a server: against other servers, whose Unix sockets gRPC would silently
// take over, and against children of this process, which would keep it.

#pragma once

#include <string>

#include "libtorchbeast/stream/endpoint.h"

namespace torchbeast {

// The exclusive right of this process to serve at an address.
//
// "unix:PATH": construction removes a socket file that is no longer served; destruction removes
// this server's own file. If several claims are made at the same time, in one process or in
// several, exactly one of them succeeds. (This holds on Linux; elsewhere, only a server that is
// already listening is detected.) A TCP port is claimed by binding it.
//
// The child of a fork inherits the sockets of its parent. If an environment forks, and its server
// is then killed, the child would keep the address, and connected learners would not see the end of
// their streams. So a child closes, as it begins, every socket that is bound to a claimed address:
// the one that listens, and those of the connections to it.
class AddressClaim {
 public:
  // Throws ConnectionError, naming the address, if it is served or claimed already, if a file of
  // another kind is there, if its folder is missing, or if the path is empty or too long for a
  // socket.
  explicit AddressClaim(const Endpoint& endpoint);
  ~AddressClaim();
  AddressClaim(const AddressClaim&) = delete;
  AddressClaim& operator=(const AddressClaim&) = delete;

 private:
  class InForks;

  bool is_claimed(int socket) const;

  const int port_;    // 0 if it is not a TCP address
  std::string path_;  // empty if it is not a Unix address
  int lock_ = -1;     // a socket that stays bound for the life of the claim
};

}  // namespace torchbeast
