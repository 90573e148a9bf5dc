// SPDX-License-Identifier: Apache-2.0
// Writes the steps of one stream into rollouts, row by row.

#pragma once

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "libtorchbeast/batching/rollout_queue.h"
#include "libtorchbeast/stream/env_stream.h"

namespace torchbeast {

// The actor's output for one step.
struct AgentStep {
  ArrayNest outputs;                // the (action, ...) tuple, leaves [1, E, ...]
  std::int64_t policy_version = 0;  // version of the weights that computed the outputs
};

// The maximum size of a rollout of all environments of a stream, including its final observations.
inline constexpr double kMaxRolloutBytes = 8.0 * (1 << 30);

// What the environments of a stream send does not fit into rollouts.
struct UnfitStream : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct RolloutWriterOptions {
  std::int64_t unroll_length;           // T
  std::int64_t num_envs;                // E
  std::int64_t columns;                 // c: environments in one item; divides E
  std::int64_t first_env = 0;           // the number of the stream's first environment
  std::int64_t first_rollout = 0;       // the number of the first rollout
  double max_bytes = kMaxRolloutBytes;  // for a rollout of all E environments
};

// Builds rollouts of T + 1 rows for E environments, as E / c items of c columns each.
//
//   row 0           row 1 ... row T            complete()
//   [ start() ] -> [ append() x T ] -> E / c QueueItems; row T is row 0 of the next rollout
//
// Row t holds the environments' output after an action, and the agent output that contained this
// action. Items own their memory: after complete() has returned an item, the writer never writes to
// it again.
// Thread safety: one thread at a time.
class RolloutWriter {
 public:
  // Throws UnfitStream if the columns do not divide the environments.
  explicit RolloutWriter(RolloutWriterOptions options);

  // Begins the first rollout. No action led to the first observation, so row 0's agent output is
  // zeros, in the structure of `agent`. agent_state is the recurrent state before row 0, with
  // leaves [layers, E, ...]. Throws std::invalid_argument if a leaf of the agent output is not [1,
  // E, ...]; and UnfitStream if a rollout is larger than max_bytes, before it allocates it.
  void start(const StreamStep& step, const AgentStep& agent, ArrayNest agent_state);

  // Adds a row. Returns true once the rollout has its T + 1 rows. Throws std::invalid_argument if
  // the agent output differs from the first in structure, dtype or shape; and UnfitStream if the
  // final observations of this rollout so far make it larger than max_bytes.
  bool append(const StreamStep& step, const AgentStep& agent);

  // Returns the finished items and begins the next rollout, with row T and the state before it.
  std::vector<QueueItem> complete(ArrayNest next_agent_state);

 private:
  // An item that is being written.
  struct Chunk {
    std::vector<Array> leaves;  // [T + 1, c, ...], in the order of the row's leaves
    std::vector<std::vector<ArrayNest>> finals;  // [column]: leaves [1, ...], by row
  };

  void begin_rollout(const ArrayNest& row);
  void write_row(const ArrayNest& row);
  void keep_finals(const StreamStep& step);
  QueueItem finish(std::size_t chunk_index, Chunk chunk) const;
  ArrayNest joined_finals(const Chunk& chunk) const;

  const RolloutWriterOptions options_;
  std::vector<Chunk> chunks_;
  std::optional<ArrayNest> last_row_;   // the structure of rows; between two rollouts: row T
  std::optional<ArrayNest> no_finals_;  // leaves [1, 0, ...]
  ArrayNest agent_state_;
  std::int64_t next_row_ = 0;
  double bytes_ = 0;      // of the current rollout, including its final observations so far
  std::int64_t rollout_;  // the number of the current rollout
};

}  // namespace torchbeast
