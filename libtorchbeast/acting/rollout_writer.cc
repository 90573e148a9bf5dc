// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/rollout_writer.h"

#include <map>
#include <string>

namespace torchbeast {
namespace {

using Map = ArrayNest::Map;

ArrayNest vector_of(std::vector<ArrayNest> entries) { return ArrayNest(std::move(entries)); }

// Makes a row: ((environment output, agent output), further data). Leaves [1, E, ...].
ArrayNest make_row(const StreamStep& step, const AgentStep& agent, std::int64_t num_envs) {
  const Array version = Array::filled<std::int64_t>({1, num_envs}, agent.policy_version);
  Map beside{{"episode_end", ArrayNest(step.episode_end)},
             {"policy_version", ArrayNest(version)},
             {"terminated", ArrayNest(step.terminated)},
             {"truncated", ArrayNest(step.truncated)}};
  if (!step.info.empty()) beside.emplace("info", ArrayNest(step.info));
  return vector_of({vector_of({env_output(step), agent.outputs}), ArrayNest(std::move(beside))});
}

AgentStep zeros_like(const AgentStep& agent) {
  return {.outputs =
              nest::map([](const Array& leaf) { return Array::zeros(leaf.dtype(), leaf.shape()); },
                        agent.outputs),
          .policy_version = agent.policy_version};
}

void check_agent_outputs(const ArrayNest& outputs, std::int64_t num_envs) {
  nest::for_each(
      [num_envs](const Array& leaf) {
        if (leaf.ndim() >= 2 && leaf.size(0) == 1 && leaf.size(1) == num_envs) return;
        throw std::invalid_argument("every agent output needs shape [1, " +
                                    std::to_string(num_envs) + ", ...], got " +
                                    to_string(leaf.shape()));
      },
      outputs);
}

// Rows are copied without further checks, so all must have equal dtypes and shapes.
void check_same_outputs(const ArrayNest& before, const ArrayNest& now) {
  nest::for_each2_with_path(
      [](const nest::Path& path, const Array& expected, const Array& got) {
        if (expected.dtype() == got.dtype() && expected.shape() == got.shape()) return;
        throw std::invalid_argument("agent output at " + path.str() + ": expected " +
                                    summary(expected) + " as before, got " + summary(got));
      },
      before, now);
}

// Throws unless a rollout of this size can be held in memory.
void check_rollout_size(double bytes, double limit, const std::string& rollout) {
  if (bytes <= limit) return;
  throw UnfitStream(
      rollout + " would take " + std::to_string(static_cast<std::int64_t>(bytes / (1 << 20))) +
      " MiB, expected at most " + std::to_string(static_cast<std::int64_t>(limit / (1 << 20))) +
      ": shorten --unroll_length, or serve fewer environments in a stream (more --num_servers)");
}

Shape chunk_shape(const Array& row_leaf, std::int64_t rows, std::int64_t columns) {
  Shape shape = row_leaf.shape();
  shape[0] = rows;
  shape[1] = columns;
  return shape;
}

}  // namespace

RolloutWriter::RolloutWriter(RolloutWriterOptions options)
    : options_(options), rollout_(options.first_rollout) {
  if (options_.columns < 1 || options_.num_envs % options_.columns != 0) {
    throw UnfitStream("rollouts of " + std::to_string(options_.columns) +
                      " columns cannot be cut from a stream of " +
                      std::to_string(options_.num_envs) +
                      " environments; the first must divide the second");
  }
}

void RolloutWriter::start(const StreamStep& step, const AgentStep& agent, ArrayNest agent_state) {
  check_agent_outputs(agent.outputs, options_.num_envs);
  no_finals_ = nest::map(
      [](const Array& leaf) {
        Shape shape = leaf.shape();
        shape[1] = 0;
        return Array(leaf.dtype(), shape);
      },
      step.observation);
  agent_state_ = std::move(agent_state);
  const ArrayNest row = make_row(step, zeros_like(agent), options_.num_envs);
  const std::int64_t rows = options_.unroll_length + 1;
  check_rollout_size(num_bytes(row) * static_cast<double>(rows), options_.max_bytes,
                     "rollouts of " + std::to_string(rows) + " rows of a stream");
  begin_rollout(row);
}

void RolloutWriter::begin_rollout(const ArrayNest& row) {
  const std::vector<Array> leaves = nest::flatten(row);
  chunks_.assign(static_cast<std::size_t>(options_.num_envs / options_.columns), {});
  for (Chunk& chunk : chunks_) {
    chunk.finals.resize(static_cast<std::size_t>(options_.columns));
    for (const Array& leaf : leaves) {
      chunk.leaves.emplace_back(leaf.dtype(),
                                chunk_shape(leaf, options_.unroll_length + 1, options_.columns));
    }
  }
  next_row_ = 0;
  bytes_ = num_bytes(row) * static_cast<double>(options_.unroll_length + 1);
  write_row(row);
}

bool RolloutWriter::append(const StreamStep& step, const AgentStep& agent) {
  check_same_outputs(last_row_->as_vector()[0].as_vector()[1], agent.outputs);
  write_row(make_row(step, agent, options_.num_envs));
  keep_finals(step);
  return next_row_ > options_.unroll_length;
}

void RolloutWriter::write_row(const ArrayNest& row) {
  const std::vector<Array> leaves = nest::flatten(row);
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const std::byte* from = leaves[i].data();
    for (Chunk& chunk : chunks_) {
      Array& to = chunk.leaves.at(i);
      const std::size_t bytes = to.num_bytes() / static_cast<std::size_t>(to.size(0));
      if (bytes > 0) {
        std::memcpy(to.data() + static_cast<std::size_t>(next_row_) * bytes, from, bytes);
      }
      from += bytes;
    }
  }
  last_row_ = row;
  ++next_row_;
}

void RolloutWriter::keep_finals(const StreamStep& step) {
  if (!step.final_observation) return;
  bytes_ += num_bytes(*step.final_observation);
  check_rollout_size(bytes_, options_.max_bytes,
                     "a stream's rollout with the final observations of its first " +
                         std::to_string(next_row_) + " rows");
  std::int64_t k = 0;
  for (std::int64_t e = 0; e < options_.num_envs; ++e) {
    if (!step.truncated.as<bool>()[e]) continue;
    Chunk& chunk = chunks_.at(static_cast<std::size_t>(e / options_.columns));
    chunk.finals.at(static_cast<std::size_t>(e % options_.columns))
        .push_back(narrow(*step.final_observation, 0, k++, 1));
  }
}

std::vector<QueueItem> RolloutWriter::complete(ArrayNest next_agent_state) {
  std::vector<Chunk> finished = std::move(chunks_);
  std::vector<QueueItem> items;
  for (std::size_t i = 0; i < finished.size(); ++i) {
    items.push_back(finish(i, std::move(finished[i])));
  }
  agent_state_ = std::move(next_agent_state);
  ++rollout_;
  begin_rollout(ArrayNest(*last_row_));
  return items;
}

QueueItem RolloutWriter::finish(std::size_t chunk_index, Chunk chunk) const {
  const std::int64_t first_column = static_cast<std::int64_t>(chunk_index) * options_.columns;
  const ArrayNest rows = nest::pack_as(*last_row_, chunk.leaves);
  Map beside = rows.as_vector()[1].as_map();
  Array streams(DType::kInt64, {1, options_.columns});
  for (std::int64_t column = 0; column < options_.columns; ++column) {
    streams.as<std::int64_t>()[column] = options_.first_env + first_column + column;
  }
  beside.emplace("stream", ArrayNest(streams));
  beside.emplace("rollout",
                 ArrayNest(Array::filled<std::int64_t>({1, options_.columns}, rollout_)));
  beside.emplace("final_observation", joined_finals(chunk));
  return {.data = vector_of(
              {rows.as_vector()[0], narrow(agent_state_, 1, first_column, options_.columns)}),
          .info = ArrayNest(std::move(beside))};
}

// Joins final observations, by column, then by row: leaves [1, K, ...].
ArrayNest RolloutWriter::joined_finals(const Chunk& chunk) const {
  std::vector<const ArrayNest*> finals;
  for (const auto& column : chunk.finals) {
    for (const ArrayNest& final_observation : column) finals.push_back(&final_observation);
  }
  if (finals.empty()) return *no_finals_;
  return with_leading(join(std::span<const ArrayNest* const>(finals), 0), 1);
}

}  // namespace torchbeast
