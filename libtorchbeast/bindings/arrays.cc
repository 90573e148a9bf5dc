// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/bindings/arrays.h"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/numpy.h>

#include <new>
#include <string>
#include <vector>

#include "nest/nest_pybind.h"

namespace torchbeast::bindings {
namespace {

namespace py = pybind11;

std::string type_name(const py::handle& object) {
  return py::str(py::type::handle_of(object).attr("__name__"));
}

// Returns torch.Tensor, or null if torch has not been imported: then no leaf is a tensor.
py::handle tensor_type() {
  static PyObject* type =
      nullptr;  // guarded by the GIL; never released, because Python may be gone
  if (type == nullptr) {
    const py::dict modules = py::module_::import("sys").attr("modules");
    if (modules.contains("torch")) {
      // It has no Tensor while another thread imports it.
      const py::object found = py::getattr(modules["torch"], "Tensor", py::none());
      if (!found.is_none()) type = py::object(found).release().ptr();
    }
  }
  return type;
}

bool is_tensor(const py::handle& leaf) {
  if (py::isinstance<py::array>(leaf)) return false;
  const py::handle type = tensor_type();
  return type && py::isinstance(leaf, type);
}

py::array tensor_to_numpy(const py::handle& tensor) {
  if (!tensor.attr("is_cpu").cast<bool>()) {
    throw py::value_error("expected a tensor on the CPU, got one on " +
                          std::string(py::str(tensor.attr("device"))) + "; call .cpu() first");
  }
  return tensor.attr("detach")().attr("numpy")();
}

DType dtype_of(const py::array& array) {
  const py::dtype dtype = array.dtype();
  const auto known = dtype_from_number(dtype.normalized_num());
  const bool native = dtype.byteorder() == '=' || dtype.byteorder() == '|';
  if (known && native && info(*known).item_size == static_cast<std::size_t>(dtype.itemsize())) {
    return *known;
  }
  throw py::value_error(
      "expected an array of bool, (u)int8 to 64 or float16 to 64 in native byte order, got " +
      std::string(py::str(dtype)));
}

Array copied(const py::array& array) {
  const DType dtype = dtype_of(array);
  const py::array dense = py::array::ensure(array, py::array::c_style);
  if (!dense) throw std::bad_alloc();  // for the copy of an array of another layout
  Array copy(dtype, {dense.shape(), dense.shape() + dense.ndim()});
  if (copy.num_bytes() > 0) std::memcpy(copy.data(), dense.data(), copy.num_bytes());
  return copy;
}

py::object as_array(const py::handle& value) {
  return py::module_::import("numpy").attr("asarray")(value);
}

Array environment_leaf(const py::handle& leaf) {
  return py::isinstance<py::array>(leaf) || is_tensor(leaf) ? array_from_python(leaf)
                                                            : copied(as_array(leaf));
}

py::array numpy_view(const Array& array) {
  auto* owner = new std::shared_ptr<std::byte>(array.owner());
  const py::capsule keep_alive(
      owner, [](void* held) { delete static_cast<std::shared_ptr<std::byte>*>(held); });
  // The array is writable, as tensors require; numpy does not copy.
  return py::array(py::dtype(static_cast<int>(array.dtype())), array.shape(),
                   const_cast<std::byte*>(array.data()), keep_alive);
}

py::object tensor_view(const Array& array) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> from_numpy;
  return from_numpy
      .call_once_and_store_result(
          [] { return py::object(py::module_::import("torch").attr("from_numpy")); })
      .get_stored()(numpy_view(array));
}

}  // namespace

Array array_from_python(const py::handle& leaf) {
  if (py::isinstance<py::array>(leaf)) return copied(py::reinterpret_borrow<py::array>(leaf));
  if (is_tensor(leaf)) return copied(tensor_to_numpy(leaf));
  throw py::type_error("expected torch.Tensor or numpy.ndarray, got " + type_name(leaf));
}

ArrayNest from_python(const py::handle& nest) {
  return nest::from_python<Array>(nest, array_from_python);
}

ArrayNest from_environment(const py::handle& nest) {
  return nest::from_python<Array>(nest, environment_leaf);
}

py::object to_torch(const ArrayNest& nest) { return nest::to_python(nest, tensor_view); }

py::object to_numpy(const ArrayNest& nest) { return nest::to_python(nest, numpy_view); }

}  // namespace torchbeast::bindings
