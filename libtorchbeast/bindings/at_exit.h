// SPDX-License-Identifier: Apache-2.0
// Ends what still runs in the core before Python ends.
//
// A thread that takes the GIL while Python is finalised is ended on the spot, in the middle of C++
// frames that cannot bear it: the process aborts or hangs. So everything that threads may wait in
// is closed when Python's atexit functions run, which is early enough: threads still get the GIL.
//
// The child of a fork has none of the threads that wait, and may find any lock taken. It forgets
// what it inherited: its exit closes nothing of its parent's and waits for nobody.

#pragma once

#include <functional>
#include <memory>
#include <utility>

namespace torchbeast::bindings {

// Counts the calling thread as being inside the core, for a scope. At exit these are waited for.
class InsideCore {
 public:
  InsideCore();
  ~InsideCore();
  InsideCore(const InsideCore&) = delete;
  InsideCore& operator=(const InsideCore&) = delete;

 private:
  void* const registry_;  // the process's own, as opposed to one of before a fork
};

// Has `close` called at exit, until the returned registration is dropped. It must not throw, and
// not need the GIL.
std::shared_ptr<void> register_for_exit(std::function<void()> close);

// The object, with `close(*object)` called at exit while the object lives.
template <typename T, typename Close>
std::shared_ptr<T> closed_at_exit(std::unique_ptr<T> object, Close close) {
  T* const raw = object.get();
  auto registration = register_for_exit([raw, close] { close(*raw); });
  return {raw, [registration = std::move(registration),
                owner = std::shared_ptr<T>(std::move(object))](T*) mutable {
            registration.reset();
            owner.reset();
          }};
}

// Closes everything that is registered, then waits, at most some seconds, until no thread is
// inside the core. Called without the GIL.
void close_everything();

// To be called in the child of a fork.
void forget_everything();

}  // namespace torchbeast::bindings
