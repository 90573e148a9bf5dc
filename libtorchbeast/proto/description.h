// SPDX-License-Identifier: Apache-2.0
// A server's description of its environments, and its form on the wire.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libtorchbeast/memory/array_ops.h"

namespace rpcenv {
class Description;
}

namespace torchbeast {

inline constexpr std::int64_t kProtocolVersion = 1;
// The maximum number of environments in one stream.
inline constexpr std::int64_t kMaxEnvsPerStream = 1 << 16;
// The maximum number of info keywords, and of bytes in each keyword.
inline constexpr std::int64_t kMaxInfoKeywords = 256;
inline constexpr std::size_t kMaxInfoKeywordBytes = 256;

// Everything that a learner has to know before it builds its model.
struct EnvDescription {
  std::string env_id = {};
  std::int64_t num_envs = 1;                    // environments in each stream
  std::int64_t num_streams = 1;                 // streams that a learner should open
  std::int64_t num_servers = 0;                 // servers started together; 0: unknown
  std::int64_t frame_stack = 1;                 // see rpcenv.proto
  ArrayNest observation = {};                   // of one environment: dtype and shape only
  std::string action_space = {};                // JSON, see rpcenv.proto; empty: unknown
  std::string observation_space = {};           // likewise
  std::string options = {};                     // likewise
  std::int64_t protocol_version = 1;            // 0: only the original protocol
  bool marks_failures = false;                  // see rpcenv.proto
  std::vector<std::string> info_keywords = {};  // numbers in the info of a game's last step
};

// Throws std::invalid_argument if there are too many keywords, or if a keyword is empty, too long,
// a duplicate, or not a valid name of a column.
void check_info_keywords(const std::vector<std::string>& keywords);

// Throws std::invalid_argument if the number of streams is out of the range that a server may
// announce.
void check_num_streams(std::int64_t number);

// Throws std::invalid_argument, showing both sides, unless a server still serves the same as
// before: the same environment, options, spaces, info keywords, and number of environments in a
// stream.
void check_same(const EnvDescription& before, const EnvDescription& now);

namespace codec {

void encode(const EnvDescription& description, rpcenv::Description* message);

// The maximum size of each of the texts that describe a server's spaces and options. Reading JSON
// takes 25 times its size.
inline constexpr std::size_t kMaxTextBytes = 16 << 20;

// Throws std::invalid_argument if the protocol version differs, if a count is out of range, if a
// text is too long, if the observation or an info keyword is invalid, or if a step with stacked
// frames would be larger than 1 GiB.
EnvDescription decode(const rpcenv::Description& message,
                      std::size_t max_text_bytes = kMaxTextBytes);

}  // namespace codec
}  // namespace torchbeast
