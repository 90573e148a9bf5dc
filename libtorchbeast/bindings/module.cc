// SPDX-License-Identifier: Apache-2.0
// The module libtorchbeast._C: exceptions, then classes.

#include <pybind11/pybind11.h>

#include "libtorchbeast/bindings/at_exit.h"
#include "libtorchbeast/bindings/bindings.h"
#include "libtorchbeast/stream/stream_errors.h"
#include "libtorchbeast/support/errors.h"
#include "nest/nest.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
  using namespace torchbeast;
  module.doc() = "The compiled part of libtorchbeast. See libtorchbeast/__init__.py.";

  py::register_exception<ClosedBatchingQueue>(module, "ClosedBatchingQueue", PyExc_RuntimeError);
  py::register_exception<AsyncError>(module, "AsyncError", PyExc_RuntimeError);
  // Local to this module: the module nest maps the same C++ type to a plain ValueError.
  py::register_local_exception<nest::NestError>(module, "NestError", PyExc_ValueError);
  py::register_exception_translator([](std::exception_ptr failure) {
    try {
      if (failure) std::rethrow_exception(failure);
    } catch (const TimeoutError& error) {
      py::set_error(PyExc_TimeoutError, error.what());
    } catch (const Unauthenticated& error) {
      py::set_error(PyExc_PermissionError, error.what());
    } catch (const ConnectionError& error) {
      py::set_error(PyExc_ConnectionError, error.what());
    }
  });

  py::module_::import("atexit").attr("register")(
      py::cpp_function(&bindings::close_everything, py::call_guard<py::gil_scoped_release>()));
  py::module_::import("os").attr("register_at_fork")(
      py::arg("after_in_child") = py::cpp_function(&bindings::forget_everything));

  bindings::bind_credentials(module);
  bindings::bind_batching_queue(module);
  bindings::bind_dynamic_batcher(module);
  bindings::bind_actor_pool(module);
  bindings::bind_server(module);
  bindings::bind_door(module);
}
