// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/bindings/description.h"

#include <pybind11/stl.h>

#include "libtorchbeast/bindings/arrays.h"
#include "libtorchbeast/proto/readable.h"
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

py::object spec_leaf(const Array& leaf) {
  return py::make_tuple(info(leaf.dtype()).name, py::tuple(py::cast(leaf.shape())));
}

// Parses the JSON that the peer `address` sent; None for empty text, which means unknown.
py::object from_json(const std::string& address, const std::string& text) {
  if (text.empty()) return py::none();
  try {
    return py::module_::import("json").attr("loads")(text);
  } catch (const py::error_already_set& error) {
    const bool unreadable = error.matches(PyExc_ValueError) ||
                            error.matches(PyExc_RecursionError);  // nested too deeply
    if (!unreadable) throw;
    throw std::invalid_argument(address + ": expected JSON, got " + readable(text.substr(0, 80)));
  }
}

}  // namespace

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

py::dict to_python(const std::string& address, const EnvDescription& description) {
  py::dict result;
  result["protocol_version"] = description.protocol_version;
  result["env_id"] = description.env_id;
  result["num_envs"] = description.num_envs;
  result["num_streams"] = description.num_streams;
  result["num_servers"] = description.num_servers;
  result["frame_stack"] = description.frame_stack;
  result["observation"] = nest::to_python(description.observation, spec_leaf);
  result["action_space"] = from_json(address, description.action_space);
  result["observation_space"] = from_json(address, description.observation_space);
  result["options"] = from_json(address, description.options);
  result["info_keywords"] = description.info_keywords;
  return result;
}

}  // namespace torchbeast::bindings
