// SPDX-License-Identifier: Apache-2.0
// ActorPool and describe() for Python.

#include "libtorchbeast/acting/actor_pool.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "libtorchbeast/bindings/arrays.h"
#include "libtorchbeast/bindings/bindings.h"
#include "libtorchbeast/bindings/description.h"
#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/bindings/options.h"
#include "libtorchbeast/stream/describe.h"
#include "libtorchbeast/stream/server_status.h"

namespace torchbeast::bindings {
namespace {

std::vector<Endpoint> endpoints_of(const std::vector<std::string>& addresses,
                                   const std::optional<Credentials>& credentials) {
  std::vector<Endpoint> endpoints;
  for (const std::string& address : addresses) {
    endpoints.emplace_back(address, credentials.value_or(Credentials{}));
  }
  return endpoints;
}

std::shared_ptr<ActorPool> make_pool(
    std::int64_t unroll_length, std::shared_ptr<RolloutQueue> learner_queue,
    std::shared_ptr<DynamicBatcher> inference_batcher, const std::vector<std::string>& addresses,
    const py::object& initial_agent_state, std::int64_t rollout_columns, std::uint64_t seed,
    double connect_timeout_s, double step_timeout_s, double reconnect_timeout_s,
    std::int64_t min_streams, const std::optional<Credentials>& credentials) {
  choose_polling();  // with the GIL, so that no Python thread accesses os.environ
  ActorPoolOptions options{
      .unroll_length = unroll_length,
      .endpoints = endpoints_of(addresses, credentials),
      .rollout_columns = rollout_columns,
      .seed = seed,
      .step_timeout = from_seconds("step_timeout_s", step_timeout_s),
      .min_streams = min_streams,
      .retries = {.connect_timeout = from_seconds("connect_timeout_s", connect_timeout_s),
                  .reconnect_timeout = from_seconds("reconnect_timeout_s", reconnect_timeout_s)}};
  return closed_at_exit(
      std::make_unique<ActorPool>(std::move(options), std::move(learner_queue),
                                  std::move(inference_batcher), from_python(initial_agent_state)),
      [](const auto& pool) { pool->stop(); });
}

py::dict describe(const std::string& address, double timeout_s,
                  const std::optional<Credentials>& credentials) {
  const auto timeout = from_seconds("timeout_s", timeout_s);
  const Endpoint endpoint(address, credentials.value_or(Credentials{}));
  choose_polling();  // with the GIL, as above
  const EnvDescription description =
      without_gil([&] { return describe_server(endpoint, timeout); });
  return to_python(address, description);
}

py::dict server_status(const std::string& address, double timeout_s,
                       const std::optional<Credentials>& credentials) {
  const auto timeout = from_seconds("timeout_s", timeout_s);
  const Endpoint endpoint(address, credentials.value_or(Credentials{}));
  choose_polling();  // with the GIL, as above
  const ServerStatus status = without_gil([&] { return ask_status(endpoint, timeout); });
  py::dict result;
  result["uptime_s"] = status.uptime_s;
  result["open_streams"] = status.open_streams;
  result["steps"] = status.steps;
  py::list hosts;
  for (const HostStatus& host : status.hosts) {
    hosts.append(py::make_tuple(host.name, host.streams, host.envs, host.joined_s));
  }
  result["hosts"] = hosts;
  return result;
}

void run(ActorPool& pool, const std::optional<py::function>& report) {
  without_gil([&] {
    pool.run(raise_pending_signals, [&](const std::string& text) {
      if (!report) return;
      const py::gil_scoped_acquire acquire;
      (*report)(text);
    });
  });
}

py::list away_streams(const ActorPool& pool) {
  py::list result;
  for (const AwayStream& stream : without_gil([&] { return pool.away_streams(); })) {
    result.append(py::make_tuple(stream.address, in_seconds(stream.away), stream.why));
  }
  return result;
}

py::object shortage(ActorPool& pool) {
  const std::optional<TooFewStreams> found = without_gil([&] { return pool.shortage(); });
  if (!found) return py::none();
  return py::make_tuple(found->connected, found->needed, in_seconds(found->left));
}

// Returns a method that takes a lock as one that Python can call: without the GIL.
template <typename Result>
auto locking(Result (ActorPool::*method)() const) {
  return [method](const ActorPool& pool) { return without_gil([&] { return (pool.*method)(); }); };
}

py::dict seconds_of(const ActorPool& pool) {
  const StageTimes times = without_gil([&] { return pool.times(); });
  py::dict result;
  result["environment"] = in_seconds(times.environment);
  result["inference"] = in_seconds(times.inference);
  result["queueing"] = in_seconds(times.queueing);
  return result;
}

}  // namespace

void bind_actor_pool(py::module_& module) {
  py::class_<ActorPool, std::shared_ptr<ActorPool>>(module, "ActorPool")
      .def(py::init(&make_pool), py::arg("unroll_length"), py::arg("learner_queue"),
           py::arg("inference_batcher"), py::arg("env_server_addresses"),
           py::arg("initial_agent_state"), py::kw_only(), py::arg("rollout_columns") = 0,
           py::arg("seed") = 0, py::arg("connect_timeout_s") = 60.0,
           py::arg("step_timeout_s") = 600.0, py::arg("reconnect_timeout_s") = 60.0,
           py::arg("min_streams") = 0, py::arg("credentials") = py::none())
      .def("run", &run, py::arg("report") = py::none())
      .def(
          "set_env_options",
          [](ActorPool& pool, const std::string& json) {
            without_gil([&] { pool.set_env_options(json); });
          },
          py::arg("json"))
      .def("count", &ActorPool::count)
      .def("steps", &ActorPool::steps)
      .def("live_streams", locking(&ActorPool::live_streams))
      .def("lost_streams", locking(&ActorPool::lost_streams))
      .def("restarted_streams", locking(&ActorPool::restarted_streams))
      .def("retired_streams", locking(&ActorPool::retired_streams))
      .def("away_streams", &away_streams)
      .def("shortage", &shortage)
      .def("seconds", &seconds_of);

  module.def("describe", &describe, py::arg("address"), py::arg("timeout_s") = 60.0,
             py::arg("credentials") = py::none());
  module.def("server_status", &server_status, py::arg("address"), py::arg("timeout_s") = 60.0,
             py::arg("credentials") = py::none());
}

}  // namespace torchbeast::bindings
