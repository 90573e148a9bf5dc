// SPDX-License-Identifier: Apache-2.0
// What a server tells of its environments, read from and written to the wire.

#pragma once

#include <cstdint>
#include <string>

#include "libtorchbeast/memory/array_ops.h"

namespace rpcenv {
class Description;
}

namespace torchbeast {

inline constexpr std::int64_t kProtocolVersion = 1;
// The most environments that one stream may carry.
inline constexpr std::int64_t kMaxEnvsPerStream = 1 << 16;

// What a learner has to know before it builds its model.
struct EnvDescription {
  std::string env_id = {};
  std::int64_t num_envs = 1;           // E of one stream
  std::int64_t num_streams = 1;        // streams that the server would like to have opened
  std::int64_t num_servers = 0;        // that were started together; 0: not known
  std::int64_t frame_stack = 1;        // see rpcenv.proto
  ArrayNest observation = {};          // one environment's; only dtype and shape count
  std::string action_space = {};       // JSON, see rpcenv.proto; empty: unknown
  std::string observation_space = {};  // likewise
  std::string options = {};            // likewise
  std::int64_t protocol_version = 1;   // 0: a server that knows only the original protocol
};

namespace codec {

void encode(const EnvDescription& description, rpcenv::Description* message);

// Throws std::invalid_argument for another protocol version, for counts out of range, and as
// decode_spec().
EnvDescription decode(const rpcenv::Description& message);

}  // namespace codec
}  // namespace torchbeast
