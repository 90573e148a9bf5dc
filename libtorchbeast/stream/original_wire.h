// SPDX-License-Identifier: Apache-2.0
// The original TorchBeast's protocol: one environment per stream, whole stacks of frames, no seed.

#pragma once

#include "libtorchbeast/stream/wire.h"

namespace torchbeast {

// Steps have E = 1. The protocol cannot distinguish truncation, or a lost life, from the end of a
// game: `done` counts as terminated and, except in the first step, as the end of an episode.
std::unique_ptr<Wire> make_original_wire(const std::shared_ptr<grpc::Channel>& channel,
                                         const Credentials& credentials);

}  // namespace torchbeast
