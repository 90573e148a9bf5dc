// SPDX-License-Identifier: Apache-2.0
// Server for Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "libtorchbeast/bindings/arrays.h"
#include "libtorchbeast/bindings/bindings.h"
#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/bindings/options.h"
#include "libtorchbeast/bindings/python_env.h"
#include "libtorchbeast/server/env_server.h"
#include "nest/nest_pybind.h"

namespace torchbeast::bindings {
namespace {

// Returns whether an object is a leaf of an observation's description: ("uint8", (1, 84, 84)).
bool is_spec(const py::handle& object) {
  return py::isinstance<py::tuple>(object) && py::len(object) == 2 &&
         py::isinstance<py::str>(object[py::int_(0)]) &&
         py::isinstance<py::tuple>(object[py::int_(1)]);
}

Array read_spec(const py::handle& leaf) {
  const auto name = leaf[py::int_(0)].cast<std::string>();
  for (const DTypeInfo& entry : kDTypes) {
    if (entry.name == name) return Array::spec(entry.dtype, leaf[py::int_(1)].cast<Shape>());
  }
  throw std::invalid_argument("unknown dtype '" + name + "' in the description of an observation");
}

ArrayNest read_specs(const py::handle& object) {
  if (is_spec(object)) return ArrayNest(read_spec(object));
  if (py::isinstance<py::dict>(object)) {
    ArrayNest::Map map;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object)) {
      map.emplace(key.cast<std::string>(), read_specs(value));
    }
    return ArrayNest(std::move(map));
  }
  ArrayNest::Vector vector;
  for (const auto& value : py::reinterpret_borrow<py::sequence>(object)) {
    vector.push_back(read_specs(value));
  }
  return ArrayNest(std::move(vector));
}

EnvDescription read_description(const py::dict& dict) {
  EnvDescription description;
  description.env_id = dict["env_id"].cast<std::string>();
  description.num_envs = dict["num_envs"].cast<std::int64_t>();
  description.num_streams = dict["num_streams"].cast<std::int64_t>();
  if (dict.contains("num_servers")) {
    description.num_servers = dict["num_servers"].cast<std::int64_t>();
  }
  description.frame_stack = dict["frame_stack"].cast<std::int64_t>();
  description.observation = read_specs(dict["observation"]);
  const py::object dumps = py::module_::import("json").attr("dumps");
  description.action_space = dumps(dict["action_space"]).cast<std::string>();
  if (dict.contains("observation_space")) {
    description.observation_space = dumps(dict["observation_space"]).cast<std::string>();
  }
  if (dict.contains("options")) description.options = dumps(dict["options"]).cast<std::string>();
  if (dict.contains("info_keywords")) {
    description.info_keywords = dict["info_keywords"].cast<std::vector<std::string>>();
    check_info_keywords(description.info_keywords);
  }
  check_num_streams(description.num_streams);
  return description;
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
      std::make_unique<EnvServer>([factory = SharedObject(env_class),
                                   keywords] { return make_python_env(factory, keywords); },
                                  Endpoint(std::move(address), credentials.value_or(Credentials{})),
                                  std::move(options)),
      [](EnvServer& server) { server.request_stop(); });
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
}

}  // namespace torchbeast::bindings
