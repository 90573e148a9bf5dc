// SPDX-License-Identifier: Apache-2.0
// Wraps a Python environment as an Env.

#pragma once

#include <memory>

#include "libtorchbeast/bindings/gil.h"
#include "libtorchbeast/server/env.h"

namespace torchbeast::bindings {

// Calls env_class() and wraps what it returns:
// * an object with `num_envs` is a vector environment: reset(seed), with a seed of 31 bits, gives
//   leaves [E, ...], step(action) gives (observation, reward, terminated, truncated, episode_end,
//   final_observation or None), and it restarts ended episodes itself; with info keywords a last
//   value follows, float32 [N, K] as in VectorStep.info of rpcenv.proto, or None if no game ended;
// * anything else is one environment, Gymnasium's (reset(seed=...) -> (obs, info), five values
//   from step) or legacy Gym's (reset() -> obs, step -> (obs, reward, done, *anything)), recognised
//   by what it returns. When an episode ends, the same step resets the environment.
//
// num_keywords: the number K of info keywords; only a vector environment may have any.
//
// Takes the GIL itself. If the Python code raises an exception, or returns a value that violates
// the contract, throws EnvironmentFailure with the traceback.
std::unique_ptr<Env> make_python_env(const SharedObject& env_class, std::size_t num_keywords);

}  // namespace torchbeast::bindings
