// SPDX-License-Identifier: Apache-2.0
// Converts nests of numpy arrays and torch tensors to and from ArrayNest, holding the GIL.

#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "libtorchbeast/memory/array_ops.h"

// In Python a shape is a sequence of integers.
template <>
struct pybind11::detail::type_caster<torchbeast::Shape>
    : pybind11::detail::list_caster<torchbeast::Shape, std::int64_t> {};

namespace torchbeast::bindings {

// Copies the leaves, because the core never keeps Python's memory: the caller may reuse it. Leaves
// must be numpy.ndarray (in any layout) or torch.Tensor on the CPU, otherwise the error is a
// TypeError. Object arrays, foreign byte orders and unknown dtypes are a ValueError.
ArrayNest from_python(const pybind11::handle& nest);
Array array_from_python(const pybind11::handle& leaf);

// Converts what environments return. Like from_python(), but Python numbers and numpy scalars
// become arrays without dimensions.
ArrayNest from_environment(const pybind11::handle& nest);

// Return tensors and arrays that share the core's memory and keep it alive.
pybind11::object to_torch(const ArrayNest& nest);
pybind11::object to_numpy(const ArrayNest& nest);

}  // namespace torchbeast::bindings
