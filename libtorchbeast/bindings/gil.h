// SPDX-License-Identifier: Apache-2.0
// The one way across the border: convert with the GIL, block without it, convert with it.

#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "libtorchbeast/bindings/at_exit.h"

namespace torchbeast::bindings {

namespace py = pybind11;

// Runs what may block, or takes long, without the GIL. `call` must not touch Python objects.
template <typename Call>
auto without_gil(const Call& call) {
  const InsideCore inside;  // until the GIL is held again
  const py::gil_scoped_release release;
  return call();
}

// Lets Ctrl-C through while the main thread waits inside the core.
inline void raise_pending_signals() {
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// Keeps the Python thread state of a thread that C++ started, for a scope within that thread.
//
// Without it each gil_scoped_acquire makes a thread state and destroys it again, and with it what
// Python keeps for a thread: threading.local, context variables, numpy's error state.
// Made and dropped by the same thread, which takes the GIL for both.
class PythonThread {
 public:
  PythonThread() : before_(PyGILState_Ensure()) {
    if (before_ == PyGILState_UNLOCKED) released_ = PyEval_SaveThread();
  }
  ~PythonThread() {
    if (released_ != nullptr) PyEval_RestoreThread(released_);
    PyGILState_Release(before_);
  }
  PythonThread(const PythonThread&) = delete;
  PythonThread& operator=(const PythonThread&) = delete;

 private:
  const PyGILState_STATE before_;
  PyThreadState* released_ = nullptr;
};

// The one holder of a Python object that C++ keeps: it may be copied and dropped by any thread.
class SharedObject {
 public:
  explicit SharedObject(py::object object)
      : object_(new py::object(std::move(object)), [](py::object* held) {
          const py::gil_scoped_acquire acquire;
          delete held;
        }) {}

  // Needs the GIL.
  const py::object& get() const { return *object_; }

 private:
  std::shared_ptr<py::object> object_;
};

}  // namespace torchbeast::bindings
