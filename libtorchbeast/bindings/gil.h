// SPDX-License-Identifier: Apache-2.0
// Crossing between Python and C++: convert with the GIL, block without it, convert with it.

#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <utility>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

#include "libtorchbeast/bindings/at_exit.h"

namespace torchbeast::bindings {

namespace py = pybind11;

// Makes a call that may wait for the GIL, in a thread that may outlive the interpreter: a daemon
// thread, or one whose environment hangs.
//
// Before 3.14, if a thread requests the GIL of a finalised interpreter, Python ends the thread by
// unwinding its stack. Destructors would then use Python without the GIL, and gRPC's frames would
// abort the process. So the thread is parked as soon as it leaves Python's frames, which is
// harmless because the process is ending anyway.
template <typename Call>
auto parked_at_exit(const Call& call) {
#ifdef __GLIBCXX__
  try {
    return call();
  } catch (abi::__forced_unwind&) {
    for (;;) ::pause();
  }
#else  // other standard libraries unwind no stack
  return call();
#endif
}

// Releases the GIL for a scope.
class NoGil {
 public:
  NoGil() : state_(PyEval_SaveThread()) {}
  ~NoGil() {
    parked_at_exit([this] { PyEval_RestoreThread(state_); });
  }
  NoGil(const NoGil&) = delete;
  NoGil& operator=(const NoGil&) = delete;

 private:
  PyThreadState* const state_;
};

// Runs a call that may block or take long, without the GIL. It must not touch Python objects.
template <typename Call>
auto without_gil(const Call& call) {
  const InsideCore inside;  // until the GIL is held again
  const NoGil released;
  return call();
}

// Raises pending signals such as Ctrl-C while the main thread waits inside the core.
inline void raise_pending_signals() {
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Holds the GIL for a scope, in a thread started by C++.
class Gil {
 public:
  Gil() {
    parked_at_exit([this] { acquire_.emplace(); });
  }

 private:
  std::optional<py::gil_scoped_acquire> acquire_;
};

// Calls callable(*args, **kwargs) of an environment. The call may hang.
inline py::object called(const py::object& callable, const py::tuple& args,
                         const py::dict& kwargs = py::dict()) {
  PyObject* result =
      parked_at_exit([&] { return PyObject_Call(callable.ptr(), args.ptr(), kwargs.ptr()); });
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Keeps the Python thread state of a thread started by C++, for a scope within that thread.
//
// Without it, each gil_scoped_acquire makes and destroys a thread state, and with it everything
// that Python keeps per thread: threading.local, context variables, numpy's error state. The same
// thread must make and destroy it, and takes the GIL for both. The thread counts as inside the
// core: at its exit, the process waits for it for a few seconds.
class PythonThread {
 public:
  PythonThread() : before_(parked_at_exit(PyGILState_Ensure)) {
    if (before_ == PyGILState_UNLOCKED) released_ = PyEval_SaveThread();
  }
  ~PythonThread() {
    if (released_ != nullptr) parked_at_exit([this] { PyEval_RestoreThread(released_); });
    PyGILState_Release(before_);
  }
  PythonThread(const PythonThread&) = delete;
  PythonThread& operator=(const PythonThread&) = delete;

 private:
  const InsideCore inside_;
  const PyGILState_STATE before_;
  PyThreadState* released_ = nullptr;
};

// Holds a Python object for C++. Any thread may copy and drop it; the last copy takes the GIL.
class SharedObject {
 public:
  explicit SharedObject(py::object object)
      : object_(new py::object(std::move(object)), [](py::object* held) {
          const Gil gil;
          delete held;
        }) {}

  // The caller must hold the GIL.
  const py::object& get() const { return *object_; }

 private:
  std::shared_ptr<py::object> object_;
};

}  // namespace torchbeast::bindings
