// SPDX-License-Identifier: Apache-2.0
// Credentials for Python.

#include "libtorchbeast/stream/credentials.h"

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "libtorchbeast/bindings/bindings.h"

namespace torchbeast::bindings {
namespace {

namespace py = pybind11;

Credentials make_credentials(std::string ca, std::string certificate, std::string key,
                             std::string token) {
  Credentials credentials{.ca = std::move(ca),
                          .certificate = std::move(certificate),
                          .key = std::move(key),
                          .token = std::move(token)};
  check(credentials);
  return credentials;
}

// Tells which secrets there are, but none of them.
std::string summary_of(const Credentials& credentials) {
  const auto has = [](const std::string& text) { return text.empty() ? "False" : "True"; };
  return std::string("Credentials(ca=") + has(credentials.ca) +
         ", certificate=" + has(credentials.certificate) + ", key=" + has(credentials.key) +
         ", token=" + has(credentials.token) + ")";
}

}  // namespace

void bind_credentials(py::module_& module) {
  py::class_<Credentials>(module, "Credentials")
      .def(py::init(&make_credentials), py::kw_only(), py::arg("ca") = "",
           py::arg("certificate") = "", py::arg("key") = "", py::arg("token") = "")
      .def("__repr__", &summary_of);
}

}  // namespace torchbeast::bindings
