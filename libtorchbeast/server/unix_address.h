// SPDX-License-Identifier: Apache-2.0
// Unix socket addresses, claimed before gRPC gets them: it would silently take over a live one.

#pragma once

#include <string>

#include "libtorchbeast/stream/endpoint.h"

namespace torchbeast {

// The right to serve at an address ("unix:PATH"; other schemes need no claim), until destroyed.
//
// A socket file that nobody serves any more is removed, and so is this server's own in the end.
// Of several claims at one moment one succeeds, in one process or in several (on Linux; elsewhere
// only a server that listens already is noticed).
class UnixAddressClaim {
 public:
  // Throws ConnectionError naming the address when somebody serves or claims it, when another kind
  // of file is there, when its folder is missing, or when the path is empty or longer than the
  // operating system allows.
  explicit UnixAddressClaim(const Endpoint& endpoint);
  ~UnixAddressClaim();
  UnixAddressClaim(const UnixAddressClaim&) = delete;
  UnixAddressClaim& operator=(const UnixAddressClaim&) = delete;

 private:
  std::string path_;  // empty: not a unix address
  int lock_ = -1;     // a socket that is bound as long as the claim lasts
};

}  // namespace torchbeast
