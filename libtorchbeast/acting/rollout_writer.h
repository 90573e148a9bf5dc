// SPDX-License-Identifier: Apache-2.0
// Writes the steps of one stream into rollouts, row by row.

#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "libtorchbeast/batching/rollout_queue.h"
#include "libtorchbeast/stream/env_stream.h"

namespace torchbeast {

// What the acting policy made of a step.
struct AgentStep {
  ArrayNest outputs;                // the (action, ...) tuple, leaves [1, E, ...]
  std::int64_t policy_version = 0;  // of the weights that computed it
};

struct RolloutWriterOptions {
  std::int64_t unroll_length;  // T
  std::int64_t num_envs;       // E
  std::int64_t columns;        // c environments in one item; divides E
  std::int64_t first_env = 0;  // the number that the stream's first environment goes by
};

// Builds rollouts of T + 1 rows for E environments, as E / c items of c columns each.
//
//   row 0           row 1 ... row T            complete()
//   [ start() ] -> [ append() x T ] -> E / c QueueItems; row T is row 0 of the next rollout
//
// Row t holds the environments' output after an action and the agent output that produced that
// action. Items own their memory: nothing is written to one after complete() gave it away.
// Thread safety: one thread at a time.
class RolloutWriter {
 public:
  explicit RolloutWriter(RolloutWriterOptions options);

  // Begins the first rollout. `agent` gives the structure of row 0's agent output, which is
  // zeros: no action led to the first observation. agent_state is the recurrent state, leaves
  // [layers, E, ...], with which row 0's observation is processed.
  void start(const StreamStep& step, const AgentStep& agent, ArrayNest agent_state);

  // Adds a row. True when the rollout has its T + 1 rows.
  bool append(const StreamStep& step, const AgentStep& agent);

  // The finished items; begins the next rollout with row T and the state to process it with.
  std::vector<QueueItem> complete(ArrayNest next_agent_state);

 private:
  // One item being written.
  struct Chunk {
    std::vector<Array> leaves;  // [T + 1, c, ...], in the order of the row's leaves
    std::vector<std::vector<ArrayNest>> finals;  // [column]: leaves [1, ...], in the order of rows
  };

  void begin_rollout(const ArrayNest& row);
  void write_row(const ArrayNest& row);
  void keep_finals(const StreamStep& step);
  QueueItem finish(std::size_t chunk_index, Chunk chunk) const;
  ArrayNest joined_finals(const Chunk& chunk) const;

  const RolloutWriterOptions options_;
  std::vector<Chunk> chunks_;
  std::optional<ArrayNest> last_row_;   // structure of a row and, between rollouts, row T
  std::optional<ArrayNest> no_finals_;  // leaves [1, 0, ...]
  ArrayNest agent_state_;
  std::int64_t next_row_ = 0;
  std::int64_t rollout_ = 0;  // running number
};

}  // namespace torchbeast
