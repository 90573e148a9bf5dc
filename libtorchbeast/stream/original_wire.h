// SPDX-License-Identifier: Apache-2.0
// The original TorchBeast's protocol: one environment per stream, whole stacks, no seed.

#pragma once

#include "libtorchbeast/stream/wire.h"

namespace torchbeast {

// Its steps have E = 1. The protocol tells neither truncation nor a lost life from the end of a
// game: every `done` counts as terminated, and every one but the first step's as an episode's end.
std::unique_ptr<Wire> make_original_wire(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace torchbeast
