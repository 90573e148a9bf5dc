// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/unix_address.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>

#include "libtorchbeast/support/errors.h"

namespace torchbeast {
namespace {

namespace fs = std::filesystem;

constexpr char kServedByAnother[] =
    "another process serves it; stop that one or choose another address";

[[noreturn]] void refuse(const std::string& address, const std::string& why) {
  throw ConnectionError("cannot serve at " + address + ": " + why);
}

sockaddr_un socket_address(const std::string& address, const std::string& path) {
  sockaddr_un result{};
  result.sun_family = AF_UNIX;
  if (path.size() >= sizeof(result.sun_path)) {
    refuse(address, "a socket's path may have " + std::to_string(sizeof(result.sun_path) - 1) +
                        " bytes, this one has " + std::to_string(path.size()) +
                        "; choose a shorter one");
  }
  std::memcpy(result.sun_path, path.c_str(), path.size() + 1);
  return result;
}

bool somebody_listens(const sockaddr_un& name) {
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM, 0);
  if (descriptor < 0) return false;
  ::fcntl(descriptor, F_SETFL, O_NONBLOCK);  // EAGAIN, not a wait, if the listener's queue is full
  const int result = ::connect(descriptor, reinterpret_cast<const sockaddr*>(&name), sizeof(name));
  const bool listens = result == 0 || errno == EAGAIN || errno == EACCES || errno == EPERM;
  ::close(descriptor);
  return listens;
}

// Binds an abstract socket name derived from the path. The kernel gives it to one socket only and
// releases it with the process, even a killed one; no file is left behind.
int take_lock(const std::string& address, const std::string& path) {
#ifdef __linux__
  const std::string whole = fs::weakly_canonical(fs::absolute(path)).string();
  const std::string name = "torchbeast-" + std::to_string(std::hash<std::string>{}(whole));
  sockaddr_un lock{};
  lock.sun_family = AF_UNIX;
  std::memcpy(lock.sun_path + 1, name.c_str(), name.size());  // a leading 0 byte: no file
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) refuse(address, std::strerror(errno));
  if (::bind(descriptor, reinterpret_cast<const sockaddr*>(&lock), size) != 0) {
    ::close(descriptor);
    refuse(address, kServedByAnother);
  }
  return descriptor;
#else
  (void)address, (void)path;
  return -1;
#endif
}

void remove_stale(const std::string& address, const std::string& path, const sockaddr_un& name) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status)) return;
  if (!fs::is_socket(status)) refuse(address, "a file that is not a socket exists there");
  if (somebody_listens(name)) refuse(address, kServedByAnother);
  fs::remove(path, error);
}

}  // namespace

UnixAddressClaim::UnixAddressClaim(const Endpoint& endpoint) {
  const std::string& address = endpoint.address;
  const auto path = endpoint.unix_path();
  if (!path) return;
  if (path->empty()) refuse(address, "expected unix:PATH, got an empty path");
  const sockaddr_un name = socket_address(address, *path);
  std::error_code error;
  const fs::path folder = fs::path(*path).parent_path();
  if (!folder.empty() && !fs::is_directory(folder, error)) {
    refuse(address, "the folder " + folder.string() + " does not exist");
  }
  lock_ = take_lock(address, *path);
  try {
    remove_stale(address, *path, name);
  } catch (...) {  // the destructor does not run
    ::close(lock_);
    throw;
  }
  path_ = *path;
}

UnixAddressClaim::~UnixAddressClaim() {
  std::error_code error;
  if (!path_.empty()) fs::remove(path_, error);
  if (lock_ >= 0) ::close(lock_);
}

}  // namespace torchbeast
