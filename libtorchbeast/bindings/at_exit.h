// SPDX-License-Identifier: Apache-2.0
// Ends everything that runs in the core before Python finalises.
//
// If a thread takes the GIL while Python finalises, Python ends it immediately, in the middle of
// C++ frames that cannot be unwound: the process aborts or hangs. Therefore Python's atexit
// functions close everything that threads may wait in, while threads can still get the GIL.
//
// The child of a fork does not have its parent's threads, and may find any lock taken. So it
// forgets what it inherited: neither its exit nor the end of an object closes anything that belongs
// to its parent, or waits for any thread.

#pragma once

#include <unistd.h>

#include <functional>
#include <memory>
#include <utility>

namespace torchbeast::bindings {

// Counts the calling thread as inside the core, for a scope. The exit waits for such threads.
class InsideCore {
 public:
  InsideCore();
  ~InsideCore();
  InsideCore(const InsideCore&) = delete;
  InsideCore& operator=(const InsideCore&) = delete;

 private:
  void* const registry_;  // the current process's, or one from before a fork
};

// Calls `close` at exit unless the returned registration has been dropped. `close` must neither
// throw nor need the GIL.
std::shared_ptr<void> register_for_exit(std::function<void()> close);

// Runs a call without the GIL, whether or not this thread holds it.
void without_any_gil(const std::function<void()>& call);

// Shares the object and calls `close(shared object)` at exit if it is still alive. The object is
// destroyed without the GIL, because it may wait for threads that need it; and not at all by the
// child of a fork.
template <typename T, typename Close>
std::shared_ptr<T> closed_at_exit(std::unique_ptr<T> object, Close close) {
  T* const raw = object.get();
  std::shared_ptr<T> owner = std::move(object);
  auto registration = register_for_exit([weak = std::weak_ptr<T>(owner), close] {
    if (const std::shared_ptr<T> alive = weak.lock()) close(alive);
  });
  return {raw, [registration = std::move(registration), owner = std::move(owner),
                process = ::getpid()](T*) mutable {
            if (process != ::getpid()) {
              new std::shared_ptr<T>(std::move(owner));  // never destroyed
              return;
            }
            without_any_gil([&] {
              registration.reset();
              owner.reset();
            });
          }};
}

// Closes everything that is registered, then waits up to a few seconds until no thread is inside
// the core. Call it without the GIL.
void close_everything();

// Drops everything that is registered. Call it in the child of a fork.
void forget_everything();

}  // namespace torchbeast::bindings
