// SPDX-License-Identifier: Apache-2.0
// Converts descriptions of environments.

#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "libtorchbeast/proto/description.h"

namespace torchbeast::bindings {

namespace py = pybind11;

// Converts a dict like the result of describe(); throws std::invalid_argument if it is not one.
EnvDescription read_description(const py::dict& dict);

// Converts the description that the peer `origin` sent; throws std::invalid_argument, naming the
// peer, if a text is not valid JSON.
py::dict to_python(const std::string& origin, const EnvDescription& description);

}  // namespace torchbeast::bindings
