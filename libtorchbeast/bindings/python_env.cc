// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/bindings/python_env.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "libtorchbeast/batching/input_check.h"
#include "libtorchbeast/bindings/arrays.h"
#include "libtorchbeast/support/errors.h"

namespace torchbeast::bindings {
namespace {

// Some environments accept only seeds of 31 bits.
constexpr std::uint64_t kSeedMask = 0x7fffffff;

// Converts text that UTF-8 may lack, such as the name of a file that Python could not decode.
std::string escaped(const py::object& text) {
  return text.attr("encode")("utf-8", "backslashreplace").cast<std::string>();
}

std::string traceback_of(const py::error_already_set& error) {
  try {
    const py::object lines =
        py::module_::import("traceback")
            .attr("format_exception")(error.type(), error.value(), error.trace());
    return escaped(py::str("").attr("join")(lines));
  } catch (const std::exception&) {  // code of an exception may fail in every way
    const auto* type = reinterpret_cast<const PyTypeObject*>(error.type().ptr());
    return std::string(type->tp_name) + ", whose traceback cannot be printed";
  }
}

// Runs Python code with the GIL, in a thread that has a PythonThread. Exceptions become
// EnvironmentFailure.
template <typename Call>
auto in_python(const Call& call) {
  const Gil gil;
  try {
    return call();
  } catch (const py::error_already_set& error) {
    throw EnvironmentFailure(traceback_of(error));
  } catch (const std::exception& error) {  // a returned value that cannot be converted
    throw EnvironmentFailure(error.what());
  }
}

py::object from_json(const std::string& json) {
  return py::module_::import("json").attr("loads")(json);
}

Array one(bool value) { return Array::filled<bool>({1}, value); }

void check_reward(float reward) {
  if (std::isfinite(reward)) return;
  throw std::invalid_argument("the environment returned reward " + std::to_string(reward) +
                              ", expected a finite number");
}

// Describes a discrete space, which is recognised by its `n`, as JSON. Returns "" for other spaces:
// the program has to describe these.
std::string discrete_space(const py::object& env) {
  const py::object space = py::getattr(env, "action_space", py::none());
  if (!py::hasattr(space, "n")) return "";
  const py::object start = py::getattr(space, "start", py::int_(0));
  return "{\"type\": \"Discrete\", \"n\": " + escaped(py::str(space.attr("n"))) +
         ", \"start\": " + escaped(py::str(start)) + "}";
}

// Appends the shapes of an action's leaves, in the order of its nest. Returns false if the space
// (Gymnasium's, one of torchbeast.core.envs or any other class) does not provide them.
bool append_shapes(const py::handle& space, std::vector<Shape>* shapes) {
  const py::object entries =
      py::getattr(space, "spaces", py::reinterpret_borrow<py::object>(space));
  if (py::isinstance<py::dict>(entries)) {
    const py::list sorted(py::module_::import("builtins").attr("sorted")(entries));
    return std::all_of(sorted.begin(), sorted.end(),
                       [&](const py::handle& key) { return append_shapes(entries[key], shapes); });
  }
  if (py::isinstance<py::tuple>(entries) || py::isinstance<py::list>(entries)) {
    return std::all_of(entries.begin(), entries.end(),
                       [&](const py::handle& entry) { return append_shapes(entry, shapes); });
  }
  if (const py::object shape = py::getattr(space, "shape", py::none()); !shape.is_none()) {
    shapes->push_back(shape.cast<Shape>());
  } else if (py::hasattr(space, "nvec")) {
    shapes->push_back({static_cast<std::int64_t>(py::len(space.attr("nvec")))});
  } else if (py::hasattr(space, "n")) {
    shapes->push_back({});
  } else {
    return false;
  }
  return true;
}

std::optional<std::vector<Shape>> shapes_of_actions(const py::object& env) {
  std::vector<Shape> shapes;
  try {
    if (append_shapes(py::getattr(env, "action_space", py::none()), &shapes)) return shapes;
  } catch (const std::exception&) {  // a space of another kind: shapes are optional
  }
  return std::nullopt;
}

// What environments of both interfaces share.
class PythonEnv : public Env {
 public:
  PythonEnv(std::unique_ptr<PythonThread> thread, py::object env)
      : thread_(std::move(thread)), env_(std::move(env)) {}
  ~PythonEnv() override {
    const Gil gil;
    try {
      if (py::hasattr(env(), "close")) called(env().attr("close"), py::tuple());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("closing an environment");
    } catch (const std::exception&) {  // no memory for the call
    }
  }

  std::string action_space() const override {
    return in_python([&] { return discrete_space(env()); });
  }
  std::optional<std::vector<Shape>> action_shapes() const override {
    return in_python([&] { return shapes_of_actions(env()); });
  }

 protected:
  const py::object& env() const { return env_.get(); }

 private:
  const std::unique_ptr<PythonThread> thread_;  // dropped after all Python objects
  const SharedObject env_;
};

class SinglePythonEnv final : public PythonEnv {
 public:
  using PythonEnv::PythonEnv;

  std::int64_t num_envs() const override { return 1; }
  std::int64_t frame_stack() const override { return 1; }

  void set_options(const std::string& json) override {
    in_python([&] { options_.emplace(from_json(json)); });
  }

  ArrayNest reset(std::uint64_t seed) override {
    return in_python([&] { return with_leading(checked(reset_observation(seed)), 1); });
  }

  EnvStep step(const ArrayNest& action) override {
    return in_python([&] {
      const py::object result =
          called(env().attr("step"), py::make_tuple(to_numpy(without_leading(action, 1))));
      return as_step(result);
    });
  }

 private:
  // Resets. Gymnasium takes a seed and returns (obs, info); legacy Gym takes none, returns obs.
  py::object reset_observation(std::optional<std::uint64_t> seed) {
    py::dict arguments;
    if (seed && takes_seed()) arguments["seed"] = *seed & kSeedMask;
    if (options_) arguments["options"] = options_->get();
    const py::object result = called(env().attr("reset"), py::tuple(), arguments);
    const bool with_info = py::isinstance<py::tuple>(result) && py::len(result) == 2 &&
                           py::isinstance<py::dict>(result[py::int_(1)]);
    return with_info ? py::object(result[py::int_(0)]) : result;
  }

  bool takes_seed() const {
    const py::object signature = py::module_::import("inspect").attr("signature");
    try {
      const py::object parameters = signature(env().attr("reset")).attr("parameters");
      return parameters.contains("seed") || parameters.contains("kwargs");
    } catch (const py::error_already_set&) {  // compiled functions may lack a signature
      return false;
    }
  }

  EnvStep as_step(const py::object& result) {
    const auto values = py::tuple(result);
    if (values.size() < 3) {
      throw std::invalid_argument(
          "step() must return (obs, reward, terminated, truncated, info) or (obs, reward, done, "
          "...), got " +
          std::to_string(values.size()) + " values");
    }
    const bool gymnasium = values.size() == 5 && !py::isinstance<py::dict>(values[3]);
    const auto reward = values[1].attr("__float__")().cast<float>();
    check_reward(reward);
    const bool over = py::bool_(py::object(values[2]));
    const bool truncated = gymnasium ? !over && py::bool_(py::object(values[3]))
                                     : over && values.size() > 3 && time_limit(values[3]);
    return finished(checked(values[0]), reward, over && !truncated, truncated);
  }

  // Returns whether legacy Gym's TimeLimit marked the episode as truncated.
  static bool time_limit(const py::object& info) {
    if (!py::isinstance<py::dict>(info)) return false;
    const auto dict = py::reinterpret_borrow<py::dict>(info);
    return dict.contains("TimeLimit.truncated") &&
           py::bool_(py::object(dict["TimeLimit.truncated"]));
  }

  EnvStep finished(const ArrayNest& observation, float reward, bool terminated, bool truncated) {
    EnvStep step{.observation = with_leading(observation, 1),
                 .reward = Array::filled<float>({1}, reward),
                 .terminated = one(terminated),
                 .truncated = one(truncated),
                 .episode_end = one(terminated || truncated)};
    if (truncated) step.final_observation = step.observation;
    if (terminated || truncated) {
      step.observation = with_leading(checked(reset_observation(std::nullopt)), 1);
    }
    return step;
  }

  // Converts an observation. Throws std::invalid_argument if it differs from the first in
  // structure, dtype or shape.
  ArrayNest checked(const py::object& observation) {
    const ArrayNest converted = from_environment(observation);
    if (!first_) first_ = converted;
    nest::for_each2_with_path(
        [](const nest::Path& path, const Array& first, const Array& now) {
          if (first.dtype() == now.dtype() && first.shape() == now.shape()) return;
          throw std::invalid_argument("the environment returned an observation of " + summary(now) +
                                      " at " + path.str() + ", its first one had " +
                                      summary(first));
        },
        *first_, converted);
    return converted;
  }

  std::optional<SharedObject> options_;  // for resets
  std::optional<ArrayNest> first_;
};

class VectorPythonEnv final : public PythonEnv {
 public:
  VectorPythonEnv(std::unique_ptr<PythonThread> thread, std::int64_t num_envs,
                  std::int64_t frame_stack, std::size_t num_keywords, py::object env)
      : PythonEnv(std::move(thread), std::move(env)),
        num_envs_(num_envs),
        frame_stack_(frame_stack),
        num_keywords_(static_cast<std::int64_t>(num_keywords)) {}

  std::int64_t num_envs() const override { return num_envs_; }
  std::int64_t frame_stack() const override { return frame_stack_; }

  void set_options(const std::string& json) override {
    in_python([&] {
      if (!py::hasattr(env(), "set_options")) {
        throw std::invalid_argument("the environment takes no options: it has no set_options");
      }
      called(env().attr("set_options"), py::make_tuple(from_json(json)));
    });
  }

  ArrayNest reset(std::uint64_t seed) override {
    return in_python([&] {
      const py::object result = called(env().attr("reset"), py::make_tuple(seed & kSeedMask));
      return rows(from_environment(result), "observation");
    });
  }

  EnvStep step(const ArrayNest& action) override {
    return in_python([&] {
      const auto values = py::tuple(called(env().attr("step"), py::make_tuple(to_numpy(action))));
      check_number(values.size());
      EnvStep step{.observation = rows(from_environment(values[0]), "observation"),
                   .reward = column<float>(values[1], "reward"),
                   .terminated = column<bool>(values[2], "terminated"),
                   .truncated = column<bool>(values[3], "truncated"),
                   .episode_end = column<bool>(values[4], "episode_end")};
      if (!values[5].is_none()) step.final_observation = from_environment(values[5]);
      for (std::int64_t e = 0; e < num_envs_; ++e) check_reward(step.reward.as<float>()[e]);
      if (num_keywords_ > 0) step.info = info(values[values.size() - 1], step.episode_end);
      if (without_info(values.size()) == 7 && !values[6].is_none()) {
        step.resets = column<bool>(values[6], "resets");
      }
      return step;
    });
  }

 private:
  void check_number(std::size_t values) const {
    if (without_info(values) == 6 || without_info(values) == 7) return;
    throw std::invalid_argument(
        "step() must return (observation, reward, terminated, truncated, episode_end, "
        "final_observation[, resets]" +
        std::string(num_keywords_ > 0 ? ", info" : "") + "), got " + std::to_string(values) +
        " values");
  }

  std::size_t without_info(std::size_t values) const {
    return values - (num_keywords_ > 0 ? 1 : 0);
  }

  std::optional<Array> info(const py::handle& value, const Array& episode_end) const {
    const bool* ended = episode_end.as<bool>();
    const std::int64_t games = std::count(ended, ended + num_envs_, true);
    if (games == 0) return std::nullopt;
    const Array wanted = Array::spec(DType::kFloat32, {games, num_keywords_});
    if (value.is_none()) {
      throw std::invalid_argument("info must be " + summary(wanted) + ", got None, but " +
                                  std::to_string(games) + " games ended");
    }
    Array array = array_from_python(value);
    if (array.dtype() == wanted.dtype() && array.shape() == wanted.shape()) return array;
    throw std::invalid_argument("info must be " + summary(wanted) + ", got " + summary(array));
  }

  ArrayNest rows(ArrayNest nest, const char* what) const {
    nest::for_each(
        [&](const Array& leaf) {
          if (leaf.ndim() >= 1 && leaf.size(0) == num_envs_) return;
          throw std::invalid_argument(std::string(what) + " needs a first dimension of " +
                                      std::to_string(num_envs_) + " environments, got " +
                                      summary(leaf));
        },
        nest);
    return nest;
  }

  template <typename T>
  Array column(const py::handle& value, const char* what) const {
    const Array array = array_from_python(value);
    if (array.dtype() == kDTypeOf<T> && array.shape() == Shape{num_envs_}) return array;
    throw std::invalid_argument(std::string(what) + " must be " +
                                summary(Array::spec(kDTypeOf<T>, {num_envs_})) + ", got " +
                                summary(array));
  }

  const std::int64_t num_envs_;
  const std::int64_t frame_stack_;
  const std::int64_t num_keywords_;  // of the info
};

std::int64_t number_of(const py::object& env, const char* name) {
  const py::object value = env.attr(name);
  try {
    return value.cast<std::int64_t>();
  } catch (const py::cast_error&) {
    throw std::invalid_argument("the environment's " + std::string(name) +
                                " must be an integer, got " + escaped(py::repr(value)));
  }
}

}  // namespace

std::unique_ptr<Env> make_python_env(const SharedObject& env_class, std::size_t num_keywords) {
  auto thread = std::make_unique<PythonThread>();
  return in_python([&]() -> std::unique_ptr<Env> {
    py::object env = called(env_class.get(), py::tuple());
    if (py::hasattr(env, "num_envs")) {
      // Read before `thread` is moved: a failure must not drop it while the GIL is held.
      const std::int64_t num_envs = number_of(env, "num_envs");
      const std::int64_t frame_stack =
          py::hasattr(env, "frame_stack") ? number_of(env, "frame_stack") : 1;
      return std::make_unique<VectorPythonEnv>(std::move(thread), num_envs, frame_stack,
                                               num_keywords, std::move(env));
    }
    if (num_keywords > 0) {
      throw std::invalid_argument(
          "info_keywords need an environment with num_envs, whose step() gives their numbers, "
          "got " +
          escaped(py::repr(env)));
    }
    return std::make_unique<SinglePythonEnv>(std::move(thread), std::move(env));
  });
}

}  // namespace torchbeast::bindings
