// SPDX-License-Identifier: Apache-2.0
// A Python environment behind the Env interface.

#pragma once

#include <memory>

#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/server/env.h"

namespace torchbeast::bindings {

// Calls env_class() and wraps what it returns:
// * an object with `num_envs` is a vector environment: reset(seed) gives leaves [E, ...],
//   step(action) gives (observation, reward, terminated, truncated, episode_end,
//   final_observation or None), and it restarts ended episodes itself;
// * anything else is one environment, Gymnasium's (reset(seed=...) -> (obs, info), five values
//   from step) or legacy Gym's (reset() -> obs, step -> (obs, reward, done, *anything)). Which of
//   them is seen from what it returns. An ended episode is reset in the same step.
//
// Takes the GIL itself. What the Python code raises comes out as EnvironmentFailure with the
// traceback; so does a value that is not what the contract says.
std::unique_ptr<Env> make_python_env(const SharedObject& env_class);

}  // namespace torchbeast::bindings
