// SPDX-License-Identifier: Apache-2.0
// Door for Python.

#include "libtorchbeast/server/door.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <system_error>
#include <thread>

#include "libtorchbeast/acting/actor_pool.h"
#include "libtorchbeast/bindings/bindings.h"
#include "libtorchbeast/bindings/description.h"
#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/bindings/options.h"

namespace torchbeast::bindings {
namespace {

// Closes a door at exit, because a TLS handshake while the process ends would crash it. The close
// waits for streams, which wait for a batcher that is perhaps closed later.
void close_in_a_thread(const std::shared_ptr<Door>& door) {
  try {
    std::thread([door, inside = std::make_shared<InsideCore>()] { door->close(false); }).detach();
  } catch (const std::system_error&) {  // the limit of threads
    door->begin_close(false);
  }
}

std::shared_ptr<Door> make_door(const std::string& address, std::int64_t max_streams,
                                double step_timeout_s,
                                const std::optional<Credentials>& credentials) {
  choose_polling();  // with the GIL, so that no Python thread accesses os.environ
  const Endpoint endpoint(address, credentials.value_or(Credentials{}));
  const DoorOptions options{.max_streams = max_streams,
                            .step_timeout = from_seconds("step_timeout_s", step_timeout_s)};
  return closed_at_exit(without_gil([&] { return std::make_unique<Door>(endpoint, options); }),
                        &close_in_a_thread);
}

// Returns (id, host, description) of the next stream that waits. One whose description makes no
// sense is refused.
py::object next(Door& door, double timeout_s) {
  const auto timeout = from_seconds("timeout_s", timeout_s);
  const std::optional<WaitingStream> found = without_gil([&] { return door.next(timeout); });
  if (!found) return py::none();
  try {
    return py::make_tuple(found->id, found->host, to_python(found->host, found->description));
  } catch (const std::invalid_argument& error) {
    door.refuse(found->id, error.what());
    return py::none();
  }
}

void take(Door& door, std::int64_t id, const std::shared_ptr<ActorPool>& pool) {
  door.take(id, [pool](EnvStream* stream) { return pool->play_joined(stream); });
}

py::list ended(Door& door) {
  py::list result;
  for (const EndedStream& stream : door.ended()) {
    result.append(py::make_tuple(stream.host, stream.why));
  }
  return result;
}

py::list hosts(const Door& door) {
  py::list result;
  for (const JoinedHost& host : door.hosts()) {
    result.append(py::make_tuple(host.name, host.streams, host.envs));
  }
  return result;
}

}  // namespace

void bind_door(py::module_& module) {
  py::class_<Door, std::shared_ptr<Door>>(module, "Door")
      .def(py::init(&make_door), py::arg("address"), py::kw_only(),
           py::arg("max_streams") = kMaxStreams, py::arg("step_timeout_s") = 600.0,
           py::arg("credentials") = py::none())
      .def("next", &next, py::arg("timeout_s"))
      .def("waits", &Door::waits, py::arg("stream"))
      .def("take", &take, py::arg("stream"), py::arg("pool").none(false))
      .def("refuse", &Door::refuse, py::arg("stream"), py::arg("reason"))
      .def("ended", &ended)
      .def("hosts", &hosts)
      .def(
          "close",
          [](Door& door, bool run_has_ended) { without_gil([&] { door.close(run_has_ended); }); },
          py::kw_only(), py::arg("run_has_ended"));
}

}  // namespace torchbeast::bindings
