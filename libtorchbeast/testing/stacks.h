// SPDX-License-Identifier: Apache-2.0
// Prints where the threads of a test program that hangs are.

#pragma once

#include <cstdlib>  // defines __GLIBC__

#ifdef __GLIBC__
#include <execinfo.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <string>
#include <thread>
#endif

namespace torchbeast::testing {

#ifdef __GLIBC__

inline std::atomic<int> stacks_printed = 0;

inline void print_own_stack(int) {
  std::array<void*, 64> frames;
  const int count = ::backtrace(frames.data(), static_cast<int>(frames.size()));
  ::dprintf(STDERR_FILENO, "\nthread %d\n", static_cast<int>(::gettid()));
  ::backtrace_symbols_fd(frames.data(), count, STDERR_FILENO);
  ++stacks_printed;
}

// Prints the stacks of all threads on stderr, each by a signal handler in its thread. Waits up to a
// second for each.
inline void print_stacks() {
  struct sigaction action{};
  action.sa_handler = print_own_stack;
  ::sigaction(SIGUSR2, &action, nullptr);
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    const int before = stacks_printed;
    ::tgkill(::getpid(), std::stoi(task.path().filename().string()), SIGUSR2);
    for (int i = 0; i < 100 && stacks_printed == before; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  }
}

#else

inline void print_stacks() {}

#endif

}  // namespace torchbeast::testing
