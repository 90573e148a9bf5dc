// SPDX-License-Identifier: Apache-2.0
// Serves the original TorchBeast's protocol, of 2019: one environment per stream, no seed.

#pragma once

#include "libtorchbeast/server/activity.h"
#include "libtorchbeast/server/call_server.h"
#include "libtorchbeast/server/env.h"

namespace torchbeast {

// Plays a stream in the original protocol until the learner ends it, and counts its steps. The
// server speaks first; a step has whole stacks of frames, and one `done` for every kind of end.
// Throws std::invalid_argument if `env` steps several environments together, or for an invalid
// action.
void stream_original(Env& env, OpenStream* open, Call* call);

}  // namespace torchbeast
