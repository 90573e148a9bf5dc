// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/bindings/at_exit.h"

#include <chrono>
#include <map>

#include "libtorchbeast/sync.h"

namespace torchbeast::bindings {
namespace {

// An environment that is in the middle of a step may need this long.
constexpr auto kLongestWait = std::chrono::seconds(10);

// Never destroyed: threads may leave the core while static objects go.
struct Registry {
  Mutex mutex;
  CondVar changed;
  int inside GUARDED_BY(mutex) = 0;
  int next_id GUARDED_BY(mutex) = 0;
  // A registration is removed under the lock that its close() runs under: the object outlives it.
  std::map<int, std::function<void()>> closes GUARDED_BY(mutex);

  static Registry& instance() {
    static Registry& registry = *new Registry;
    return registry;
  }
};

}  // namespace

InsideCore::InsideCore() {
  Registry& registry = Registry::instance();
  MutexLock lock(registry.mutex);
  ++registry.inside;
}

InsideCore::~InsideCore() {
  Registry& registry = Registry::instance();
  MutexLock lock(registry.mutex);
  --registry.inside;
  registry.changed.notify_all();
}

std::shared_ptr<void> register_for_exit(std::function<void()> close) {
  Registry& registry = Registry::instance();
  MutexLock lock(registry.mutex);
  const int id = registry.next_id++;
  registry.closes.emplace(id, std::move(close));
  return {nullptr, [id](void*) {
            Registry& owner = Registry::instance();
            MutexLock unregister(owner.mutex);
            owner.closes.erase(id);
          }};
}

void close_everything() {
  Registry& registry = Registry::instance();
  const auto deadline = Clock::now() + kLongestWait;
  MutexLock lock(registry.mutex);
  for (const auto& [id, close] : registry.closes) close();
  while (registry.inside > 0 && Clock::now() < deadline) {
    registry.changed.wait_until(registry.mutex, deadline);
  }
}

}  // namespace torchbeast::bindings
