// SPDX-License-Identifier: Apache-2.0
// Converts descriptions of environments.

#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "libtorchbeast/proto/description.h"

namespace torchbeast::bindings {

namespace py = pybind11;

// Converts a dict such as describe() returns; throws std::invalid_argument for one that is none.
EnvDescription read_description(const py::dict& dict);

// Converts the description that the peer `origin` sent; throws std::invalid_argument, naming it,
// for a text that is no JSON.
py::dict to_python(const std::string& origin, const EnvDescription& description);

}  // namespace torchbeast::bindings
