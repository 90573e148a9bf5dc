// SPDX-License-Identifier: Apache-2.0

#include "libtorchbeast/acting/stream_player.h"

#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

namespace torchbeast {
namespace {

// Makes the inputs of inference: ((observation, reward, done, ...), agent_state).
ArrayNest inference_inputs(const StreamStep& step, const ArrayNest& agent_state) {
  return ArrayNest(ArrayNest::Vector{env_output(step), agent_state});
}

// Throws std::invalid_argument unless the outputs are ((action, ...), new_agent_state).
void check_agent_answer(const ArrayNest& outputs) {
  if (!outputs.is_vector()) throw std::invalid_argument("Expected agent output to be tuple");
  if (outputs.as_vector().size() != 2) {
    throw std::invalid_argument(
        "Expected agent output to be ((action, ...), new_state) but got sequence of length " +
        std::to_string(outputs.as_vector().size()));
  }
  if (!outputs.as_vector()[0].is_vector() || outputs.as_vector()[0].as_vector().empty()) {
    throw std::invalid_argument("Expected first entry of agent output to be a (action, ...) tuple");
  }
}

// Adds the stream and its server's address to the message of an error in inference or in its
// outputs. Errors from the server name the address already.
template <typename Error>
Error with_stream(const Error& error, std::int64_t number, const std::string& address) {
  const std::string message = error.what();
  if (message.find(address) != std::string::npos) return error;
  return Error(message + " (stream " + std::to_string(number) + ", of the environment server at " +
               address + ")");
}

}  // namespace

StreamPlayer::StreamPlayer(StreamPlayerOptions options, std::shared_ptr<RolloutQueue> learner_queue,
                           std::shared_ptr<DynamicBatcher> inference_batcher,
                           ArrayNest initial_agent_state)
    : options_(options),
      learner_queue_(std::move(learner_queue)),
      inference_batcher_(std::move(inference_batcher)),
      initial_agent_state_(std::move(initial_agent_state)) {
  if (options_.unroll_length < 1) {
    throw std::invalid_argument("unroll_length must be >= 1, got " +
                                std::to_string(options_.unroll_length));
  }
  nest::for_each(
      [](const Array& leaf) {
        if (leaf.ndim() >= 2 && leaf.size(1) == 1) return;
        throw std::invalid_argument(
            "initial_agent_state needs leaves [layers, 1, ...], one environment's, got " +
            to_string(leaf.shape()));
      },
      initial_agent_state_);
}

void StreamPlayer::set_env_options(std::string json) {
  MutexLock lock(mutex_);
  env_options_ = std::move(json);
  ++options_version_;
}

void StreamPlayer::give_options(EnvStream* connection, PlayedStream* stream) {
  if (stream->options_version == options_version_) return;
  MutexLock lock(mutex_);
  connection->give_options(env_options_);
  stream->options_version = options_version_;
}

void StreamPlayer::play(EnvStream* connection, PlayedStream* stream, StreamStep first) {
  const std::string& address = stream->endpoint.address;
  try {
    step_until_stopped(connection, stream, std::move(first));
  } catch (const ClosedBatchingQueue&) {
    connection->close();
    throw;
  } catch (const Unresponsive&) {
    throw;
  } catch (const AsyncError& error) {
    throw with_stream(error, stream->number, address);
  } catch (const TimeoutError& error) {
    throw with_stream(error, stream->number, address);
  } catch (const UnfitStream& error) {
    throw with_stream(error, stream->number, address);
  } catch (const std::invalid_argument& error) {
    throw with_stream(error, stream->number, address);
  } catch (const std::bad_alloc&) {
    throw with_stream(OutOfMemory("out of memory"), stream->number, address);
  }
}

void StreamPlayer::step_until_stopped(EnvStream* connection, PlayedStream* stream,
                                      StreamStep step) {
  const std::int64_t num_envs = connection->num_envs();
  const std::int64_t columns = options_.rollout_columns > 0 ? options_.rollout_columns : num_envs;
  RolloutWriter writer({.unroll_length = options_.unroll_length,
                        .num_envs = num_envs,
                        .columns = columns,
                        .first_env = stream->number * kMaxEnvsPerStream,
                        .first_rollout = stream->history.first_rollout(),
                        .max_bytes = options_.max_rollout_bytes});
  ArrayNest agent_state = nest::map(
      [num_envs](const Array& leaf) { return repeat(leaf, 1, num_envs); }, initial_agent_state_);
  StageClock& clock = stream->clock;
  clock.enter(Stage::kInference);
  Answer answer = ask(step, agent_state);
  writer.start(step, {answer.outputs.as_vector()[0], answer.version}, agent_state);
  for (;;) {
    clock.enter(Stage::kEnvironment);
    const ArrayNest& outputs = answer.outputs.as_vector()[0];
    give_options(connection, stream);
    step = connection->step(outputs.as_vector()[0]);
    steps_ += num_envs;
    agent_state = answer.outputs.as_vector()[1];
    if (writer.append(step, {outputs, answer.version})) {
      clock.enter(Stage::kQueueing);
      hand_over(writer.complete(agent_state), columns);
      stream->history.completed_rollout();
    }
    clock.enter(Stage::kInference);
    answer = ask(step, agent_state);
  }
}

Answer StreamPlayer::ask(const StreamStep& step, const ArrayNest& agent_state) {
  Answer answer = inference_batcher_->compute(inference_inputs(step, agent_state));
  check_agent_answer(answer.outputs);
  return answer;
}

void StreamPlayer::hand_over(std::vector<QueueItem> items, std::int64_t columns) {
  for (QueueItem& item : items) {
    learner_queue_->enqueue(std::move(item));
    count_ += options_.unroll_length * columns;
  }
}

}  // namespace torchbeast
