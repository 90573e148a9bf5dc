// SPDX-License-Identifier: Apache-2.0
// Unix socket addresses, checked before gRPC gets them: it would silently take over a live one.

#pragma once

#include <string>

namespace torchbeast {

// Makes sure that a server may be bound to `address` ("unix:PATH"; other schemes pass).
// A socket file that nobody serves any more is removed. Throws ConnectionError naming the address
// when somebody serves it, when another kind of file is there, when its folder is missing, or when
// the path is longer than the operating system allows.
void claim_unix_address(const std::string& address);

// Removes the socket file of an address that this process served.
void release_unix_address(const std::string& address);

}  // namespace torchbeast
