// SPDX-License-Identifier: Apache-2.0
// BatchingQueue for Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "libtorchbeast/batching/rollout_queue.h"
#include "libtorchbeast/bindings/arrays.h"
#include "libtorchbeast/bindings/bindings.h"
#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/bindings/options.h"

namespace torchbeast::bindings {
namespace {

QueueItem next_rollout(RolloutQueue& queue) {
  auto item = without_gil([&] { return queue.dequeue(); });
  if (!item) throw py::stop_iteration();
  return std::move(*item);
}

// Iterates over (nest, info) of one queue.
struct WithInfo {
  std::shared_ptr<RolloutQueue> queue;
};

std::shared_ptr<RolloutQueue> make_queue(std::int64_t batch_dim, std::int64_t minimum,
                                         std::int64_t maximum, std::optional<std::int64_t> timeout,
                                         bool check_inputs,
                                         std::optional<std::int64_t> maximum_queue_size,
                                         std::int64_t spare_columns) {
  RolloutQueueOptions options{.batch_dim = checked_batch_dim(batch_dim),
                              .spare_columns = spare_columns,
                              .check_inputs = check_inputs,
                              .queue = queue_options(minimum, maximum, timeout)};
  options.queue.maximum_queue_size = maximum_queue_size;
  return closed_at_exit(std::make_unique<RolloutQueue>(options),
                        [](const auto& queue) { queue->try_close(); });
}

std::string queue_repr(const RolloutQueue& queue) {
  const auto& options = queue.options().queue;
  const std::string capacity =
      options.maximum_queue_size ? std::to_string(*options.maximum_queue_size) : "unbounded";
  return "<BatchingQueue " + std::to_string(queue.size()) + " of " + capacity + " items" +
         (queue.is_closed() ? ", closed>" : ">");
}

}  // namespace

void bind_batching_queue(py::module_& module) {
  py::class_<WithInfo>(module, "_WithInfo")
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", [](WithInfo& self) {
        const QueueItem item = next_rollout(*self.queue);
        return py::make_tuple(to_torch(item.data), to_torch(item.info));
      });

  py::class_<RolloutQueue, std::shared_ptr<RolloutQueue>>(module, "BatchingQueue")
      .def(py::init(&make_queue), py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = py::none(),
           py::arg("check_inputs") = true, py::arg("maximum_queue_size") = py::none(),
           py::kw_only(), py::arg("spare_columns") = 0)
      .def(
          "enqueue",
          [](RolloutQueue& queue, const py::object& nest, const py::object& info) {
            QueueItem item{from_python(nest), from_python(info)};
            without_gil([&] { queue.enqueue(std::move(item)); });
          },
          py::arg("nest"), py::arg("info") = py::tuple())
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", [](RolloutQueue& queue) { return to_torch(next_rollout(queue).data); })
      .def("with_info",
           [](std::shared_ptr<RolloutQueue> queue) { return WithInfo{std::move(queue)}; })
      .def("size", &RolloutQueue::size)
      .def("is_closed", &RolloutQueue::is_closed)
      .def("close", [](RolloutQueue& queue) { without_gil([&] { queue.close(); }); })
      .def("__repr__", &queue_repr);
}

}  // namespace torchbeast::bindings
