// SPDX-License-Identifier: Apache-2.0
// Nests of numpy arrays and torch tensors <-> ArrayNest. All functions need the GIL.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "libtorchbeast/memory/array_ops.h"

// A shape is a sequence of numbers in Python.
template <>
struct pybind11::detail::type_caster<torchbeast::Shape>
    : pybind11::detail::list_caster<torchbeast::Shape, std::int64_t> {};

namespace torchbeast::bindings {

// Copies: the core never holds Python's memory, and the caller may reuse its own. Leaves are
// numpy.ndarray (any layout) or torch.Tensor on the CPU; else TypeError. An object array, a
// foreign byte order or an unknown dtype: ValueError.
ArrayNest from_python(const pybind11::handle& nest);
Array array_from_python(const pybind11::handle& leaf);

// As from_python, and Python numbers and numpy scalars become 0-d arrays. For environments.
ArrayNest from_environment(const pybind11::handle& nest);

// Tensors and arrays that share the core's memory and keep it alive.
pybind11::object to_torch(const ArrayNest& nest);
pybind11::object to_numpy(const ArrayNest& nest);

}  // namespace torchbeast::bindings
