// SPDX-License-Identifier: Apache-2.0
// Server and Host for Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "libtorchbeast/bindings/bindings.h"
#include "libtorchbeast/bindings/description.h"
#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/bindings/options.h"
#include "libtorchbeast/bindings/python_env.h"
#include "libtorchbeast/server/env_server.h"
#include "libtorchbeast/server/host.h"

namespace torchbeast::bindings {
namespace {

EnvFactory factory_of(const py::object& env_class, std::size_t keywords) {
  return
      [factory = SharedObject(env_class), keywords] { return make_python_env(factory, keywords); };
}

std::shared_ptr<EnvServer> make_server(const py::object& env_class, std::string address,
                                       std::string env_id, std::int64_t num_streams,
                                       std::int64_t max_streams,
                                       const std::optional<py::dict>& description,
                                       double stop_timeout_s,
                                       const std::optional<Credentials>& credentials) {
  if (max_streams < 1 || max_streams > kMaxEnvsPerStream) {
    throw std::invalid_argument("max_streams must lie between 1 and " +
                                std::to_string(kMaxEnvsPerStream) + ", got " +
                                std::to_string(max_streams));
  }
  check_num_streams(num_streams);
  EnvServerOptions options{.env_id = std::move(env_id),
                           .num_streams = num_streams,
                           .max_streams = max_streams,
                           .step_grace = from_seconds("stop_timeout_s", stop_timeout_s)};
  if (description) options.description = read_description(*description);
  const std::size_t keywords = description ? options.description->info_keywords.size() : 0;
  return closed_at_exit(
      std::make_unique<EnvServer>(factory_of(env_class, keywords),
                                  Endpoint(std::move(address), credentials.value_or(Credentials{})),
                                  std::move(options)),
      [](const auto& server) { server->request_stop(); });
}

std::shared_ptr<Host> make_host(const py::object& env_class, std::string learner_address,
                                const py::dict& description, std::string name,
                                const std::optional<Credentials>& credentials) {
  choose_polling();  // with the GIL, so that no Python thread accesses os.environ
  EnvDescription described = read_description(description);
  const std::size_t keywords = described.info_keywords.size();
  return closed_at_exit(std::make_unique<Host>(factory_of(env_class, keywords),
                                               Endpoint(std::move(learner_address),
                                                        credentials.value_or(Credentials{})),
                                               std::move(described), std::move(name)),
                        [](const auto& host) { host->stop(); });
}

void play(Host& host, double timeout_s, const std::optional<py::function>& on_taken) {
  const auto timeout = from_seconds("timeout_s", timeout_s);
  without_gil([&] {
    host.play(timeout, [&] {
      if (!on_taken) return;
      const py::gil_scoped_acquire acquire;
      (*on_taken)();
    });
  });
}

}  // namespace

void bind_server(py::module_& module) {
  py::class_<EnvServer, std::shared_ptr<EnvServer>>(module, "Server")
      .def(py::init(&make_server), py::arg("env_class"),
           py::arg("server_address") = "unix:/tmp/polybeast", py::kw_only(), py::arg("env_id") = "",
           py::arg("num_streams") = 1, py::arg("max_streams") = 1024,
           py::arg("description") = py::none(), py::arg("stop_timeout_s") = 5.0,
           py::arg("credentials") = py::none())
      .def("run",
           [](EnvServer& server) {
             choose_polling();  // with the GIL, so that no Python thread accesses os.environ
             without_gil([&] { server.run(raise_pending_signals); });
           })
      .def("stop", [](EnvServer& server) { without_gil([&] { server.stop(); }); })
      .def(
          "wait_until_serving",
          [](EnvServer& server, double timeout_s) {
            const auto timeout = from_seconds("timeout_s", timeout_s);
            return without_gil([&] { return server.wait_until_serving(timeout); });
          },
          py::arg("timeout_s") = 10.0);

  py::class_<Host, std::shared_ptr<Host>>(module, "Host")
      .def(py::init(&make_host), py::arg("env_class"), py::arg("learner_address"), py::kw_only(),
           py::arg("description"), py::arg("name"), py::arg("credentials") = py::none())
      .def("play", &play, py::arg("timeout_s") = 5.0, py::arg("on_taken") = py::none())
      .def("stop", [](Host& host) { without_gil([&] { host.stop(); }); });
}

}  // namespace torchbeast::bindings
