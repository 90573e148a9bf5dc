// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/server/address_claim.h"

#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <mutex>
#include <set>

#include "libtorchbeast/support/errors.h"

namespace torchbeast {
namespace {

namespace fs = std::filesystem;

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

// A socket that programs which are started do not inherit.
int new_socket() {
#ifdef __linux__
  return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
#else
  const int descriptor = ::socket(AF_UNIX, SOCK_STREAM, 0);
  if (descriptor >= 0) ::fcntl(descriptor, F_SETFD, FD_CLOEXEC);
  return descriptor;
#endif
}

// Returns who listens there, for a message; "" if nobody does.
std::string listener(const sockaddr_un& name) {
  const int descriptor = new_socket();
  if (descriptor < 0) return "";
  ::fcntl(descriptor, F_SETFL, O_NONBLOCK);  // EAGAIN, not a wait, if the listener's queue is full
  const int result = ::connect(descriptor, reinterpret_cast<const sockaddr*>(&name), sizeof(name));
  const bool listens = result == 0 || errno == EAGAIN || errno == EACCES || errno == EPERM;
  std::string who = listens ? "another process" : "";
#ifdef __linux__
  ucred peer{};
  socklen_t size = sizeof(peer);
  if (result == 0 && ::getsockopt(descriptor, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 &&
      peer.pid > 0) {  // 0: in another namespace of processes
    who = "process " + std::to_string(peer.pid);
  }
#endif
  ::close(descriptor);
  return who;
}

[[noreturn]] void refuse_served(const std::string& address, const std::string& who) {
  refuse(address, (who.empty() ? "another process" : who) +
                      " serves it; stop that one or choose another address");
}

// Binds an abstract socket name derived from the path and its folder. The kernel gives it to one
// socket only and releases it with the process, even a killed one; no file is left behind.
int take_lock(const std::string& address, const std::string& path, const sockaddr_un& name) {
#ifdef __linux__
  const fs::path whole = fs::weakly_canonical(fs::absolute(path));
  // The folder's number too, because two jobs on a machine may each have a /tmp of their own.
  struct stat folder{};
  ::stat(whole.parent_path().c_str(), &folder);
  const std::string place =
      whole.string() + ":" + std::to_string(folder.st_dev) + ":" + std::to_string(folder.st_ino);
  const std::string key = "torchbeast-" + std::to_string(std::hash<std::string>{}(place));
  sockaddr_un lock{};
  lock.sun_family = AF_UNIX;
  std::memcpy(lock.sun_path + 1, key.c_str(), key.size());  // a leading 0 byte: no file
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + key.size());
  const int descriptor = new_socket();
  if (descriptor < 0) refuse(address, std::strerror(errno));
  if (::bind(descriptor, reinterpret_cast<const sockaddr*>(&lock), size) != 0) {
    ::close(descriptor);
    refuse_served(address, listener(name));
  }
  return descriptor;
#else
  (void)address, (void)path, (void)name;
  return -1;
#endif
}

void remove_stale(const std::string& address, const std::string& path, const sockaddr_un& name) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status)) return;
  if (!fs::is_socket(status)) refuse(address, "a file that is not a socket exists there");
  if (const std::string who = listener(name); !who.empty()) refuse_served(address, who);
  fs::remove(path, error);
}

int port_of(const Endpoint& endpoint) {
  const std::string port = endpoint.tcp_port().value_or("0");
  return port.size() <= 5 ? std::stoi(port) : 0;
}

}  // namespace

// All claims of this process. The lock is held during a fork, so that the child finds them whole.
class AddressClaim::InForks {
 public:
  static void add(const AddressClaim* claim) {
    static const int once = ::pthread_atfork([] { mutex_.lock(); }, [] { mutex_.unlock(); },
                                             [] { close_all(), mutex_.unlock(); });
    (void)once;
    const std::lock_guard lock(mutex_);
    claims_.insert(claim);
  }
  static void remove(const AddressClaim* claim) {
    const std::lock_guard lock(mutex_);
    claims_.erase(claim);
  }

 private:
  static void close_all() {
    if (claims_.empty()) return;
    std::set<const AddressClaim*> claims;  // once: the child may use the numbers for other files
    claims.swap(claims_);
    for (const AddressClaim* claim : claims) ::close(claim->lock_);
    DIR* const folder = ::opendir("/dev/fd");
    if (folder == nullptr) return;
    while (const dirent* entry = ::readdir(folder)) {
      const int descriptor = std::atoi(entry->d_name);
      for (const AddressClaim* claim : claims) {
        if (!claim->is_claimed(descriptor)) continue;
        ::close(descriptor);
        break;
      }
    }
    ::closedir(folder);
  }

  static inline std::mutex mutex_;
  static inline std::set<const AddressClaim*> claims_;
};

AddressClaim::AddressClaim(const Endpoint& endpoint) : port_(port_of(endpoint)) {
  const std::string& address = endpoint.address;
  if (const auto path = endpoint.unix_path()) {
    if (path->empty()) refuse(address, "expected unix:PATH, got an empty path");
    const sockaddr_un name = socket_address(address, *path);
    std::error_code error;
    const fs::path folder = fs::path(*path).parent_path();
    if (!folder.empty() && !fs::is_directory(folder, error)) {
      refuse(address, "the folder " + folder.string() + " does not exist");
    }
    lock_ = take_lock(address, *path, name);
    try {
      remove_stale(address, *path, name);
    } catch (...) {  // the destructor does not run
      ::close(lock_);
      throw;
    }
    path_ = *path;
  }
  InForks::add(this);
}

AddressClaim::~AddressClaim() {
  InForks::remove(this);
  std::error_code error;
  if (!path_.empty()) fs::remove(path_, error);
  if (lock_ >= 0) ::close(lock_);
}

// Returns whether a descriptor is a socket that is bound to the address.
bool AddressClaim::is_claimed(int socket) const {
  sockaddr_storage name{};
  socklen_t size = sizeof(name);
  if (::getsockname(socket, reinterpret_cast<sockaddr*>(&name), &size) != 0) return false;
  switch (name.ss_family) {
    case AF_UNIX:
      return !path_.empty() && path_ == reinterpret_cast<const sockaddr_un&>(name).sun_path;
    case AF_INET:
    case AF_INET6:  // has its port in the same place
      return port_ != 0 && ntohs(reinterpret_cast<const sockaddr_in&>(name).sin_port) == port_;
    default:
      return false;
  }
}

}  // namespace torchbeast
