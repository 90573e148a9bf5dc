// SPDX-License-Identifier: Apache-2.0
// DynamicBatcher and Batch for Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "libtorchbeast/batching/dynamic_batcher.h"
#include "libtorchbeast/bindings/arrays.h"
#include "libtorchbeast/bindings/bindings.h"
#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/bindings/options.h"

namespace torchbeast::bindings {
namespace {

std::shared_ptr<DynamicBatcher> make_batcher(std::int64_t batch_dim, std::int64_t minimum,
                                             std::int64_t maximum,
                                             std::optional<std::int64_t> timeout_ms,
                                             bool check_outputs) {
  DynamicBatcherOptions options{.batch_dim = checked_batch_dim(batch_dim),
                                .check_outputs = check_outputs,
                                .queue = queue_options(minimum, maximum, timeout_ms)};
  return closed_at_exit(std::make_unique<DynamicBatcher>(options),
                        [](const auto& batcher) { batcher->cancel(); });
}

std::unique_ptr<Batch> next_batch(DynamicBatcher& batcher) {
  auto batch = without_gil([&] { return batcher.next(); });
  if (batch == nullptr) throw py::stop_iteration();
  return batch;
}

std::string batcher_repr(const DynamicBatcher& batcher) {
  return "<DynamicBatcher " + std::to_string(batcher.size()) + " computations waiting" +
         (batcher.is_closed() ? ", closed>" : ">");
}

}  // namespace

void bind_dynamic_batcher(py::module_& module) {
  py::class_<Batch>(module, "Batch")
      .def("get_inputs", [](const Batch& batch) { return to_torch(batch.get_inputs()); })
      .def(
          "set_outputs",
          [](Batch& batch, const py::object& outputs, std::int64_t version) {
            ArrayNest converted = from_python(outputs);
            without_gil([&] { batch.set_outputs(std::move(converted), version); });
          },
          py::arg("outputs"), py::arg("version") = 0);

  py::class_<DynamicBatcher, std::shared_ptr<DynamicBatcher>>(module, "DynamicBatcher")
      .def(py::init(&make_batcher), py::arg("batch_dim") = 1, py::arg("minimum_batch_size") = 1,
           py::arg("maximum_batch_size") = 1024, py::arg("timeout_ms") = 100,
           py::arg("check_outputs") = true)
      .def(
          "compute",
          [](DynamicBatcher& batcher, const py::object& nest) {
            ArrayNest inputs = from_python(nest);
            const Answer answer = without_gil([&] { return batcher.compute(std::move(inputs)); });
            return to_torch(answer.outputs);
          },
          py::arg("nest"))
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &next_batch)
      .def("size", &DynamicBatcher::size)
      .def("is_closed", &DynamicBatcher::is_closed)
      .def("close", [](DynamicBatcher& batcher) { without_gil([&] { batcher.close(); }); })
      .def("__repr__", &batcher_repr);
}

}  // namespace torchbeast::bindings
