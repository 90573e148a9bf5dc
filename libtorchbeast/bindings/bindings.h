// SPDX-License-Identifier: Apache-2.0
// One function per bound class, called by bindings/module.cc.

#pragma once

#include <pybind11/pybind11.h>

namespace torchbeast::bindings {

void bind_credentials(pybind11::module_& module);
void bind_batching_queue(pybind11::module_& module);
void bind_dynamic_batcher(pybind11::module_& module);
void bind_actor_pool(pybind11::module_& module);
void bind_server(pybind11::module_& module);
void bind_door(pybind11::module_& module);

}  // namespace torchbeast::bindings
