// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/bindings/at_exit.h"

#include <pybind11/pybind11.h>

#include <atomic>
#include <chrono>
#include <map>
#include <optional>

#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/memory/buffer.h"
#include "libtorchbeast/support/sync.h"

namespace torchbeast::bindings {
namespace {

// Longer than a server waits, by default, for an environment that is in the middle of a step.
constexpr auto kLongestWait = std::chrono::seconds(6);

// Never destroyed, because threads may leave the core while static objects are destroyed.
struct Registry {
  Mutex mutex;
  CondVar changed;
  int inside GUARDED_BY(mutex) = 0;
  std::map<int, std::function<void()>> closes GUARDED_BY(mutex);
};

std::atomic<Registry*> current = new Registry;  // replaced in the child of a fork
std::atomic<int> next_id = 0;                   // unique, also in a child

}  // namespace

InsideCore::InsideCore() : registry_(current) {
  Registry& registry = *static_cast<Registry*>(registry_);
  MutexLock lock(registry.mutex);
  ++registry.inside;
}

InsideCore::~InsideCore() {
  Registry& registry = *static_cast<Registry*>(registry_);
  if (&registry != current) return;
  MutexLock lock(registry.mutex);
  --registry.inside;
  registry.changed.notify_all();
}

void without_any_gil(const std::function<void()>& call) {
  const InsideCore inside;  // until the GIL is held again
  std::optional<NoGil> released;
  // Once Python has finalised, PyGILState_Check() is true in every thread.
  if (Py_IsInitialized() && PyGILState_Check()) released.emplace();
  call();
}

std::shared_ptr<void> register_for_exit(std::function<void()> close) {
  Registry& registry = *current;
  MutexLock lock(registry.mutex);
  const int id = next_id++;
  registry.closes.emplace(id, std::move(close));
  return {nullptr, [id](void*) {
            Registry& owner = *current;
            MutexLock unregister(owner.mutex);
            owner.closes.erase(id);
          }};
}

void close_everything() {
  Registry& registry = *current;
  const auto deadline = Clock::now() + kLongestWait;
  const auto closes = [&] {
    MutexLock lock(registry.mutex);
    return registry.closes;
  }();
  for (const auto& [id, close] : closes) close();  // without the lock: it may start a thread inside
  MutexLock lock(registry.mutex);
  while (registry.inside > 0 && Clock::now() < deadline) {
    registry.changed.wait_until(registry.mutex, deadline);
  }
}

void forget_everything() {
  current = new Registry;
  BufferPool::instance().retire();
}

}  // namespace torchbeast::bindings
