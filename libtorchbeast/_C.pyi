# SPDX-License-Identifier: Apache-2.0
"""The compiled part of libtorchbeast: its names, their types and what each does.

A nest is a leaf, a tuple or list of nests, or a dict of nests with string keys. Leaves that go in
are torch tensors on the CPU or numpy arrays, of bool, (u)int8 to (u)int64 or float16 to float64, in
any layout; they are copied. Leaves that come out are torch tensors that share the core's memory;
lists come out as tuples, dicts with their keys sorted. A leaf of another type is a TypeError, an
array of another dtype or byte order and a nest that is too deep or cyclic a ValueError.

Every call that waits does so without the interpreter lock, and ends when its object is closed.

In shapes, T is the unroll length, B the number of environments (columns), K the number of truncated
episodes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

_Nest: TypeAlias = Any  # recursive and mixed: no narrower type holds for its users

class ClosedBatchingQueue(RuntimeError):
    """A queue or batcher was closed: before the call, or while it waited."""

class AsyncError(RuntimeError):
    """The batch that a compute() was part of was dropped unanswered."""

class NestError(ValueError):
    """A nest of another structure than was expected, or too deep. The message names the place."""

@final
class BatchingQueue:
    """A bounded queue that hands out its items in batches.

        enqueue() -> [ item item item ... ] -> next()

    All methods may be called from any number of threads.
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: int | None = None,
        check_inputs: bool = True,
        maximum_queue_size: int | None = None,
    ) -> None:
        """Makes an open queue.

        Args:
            batch_dim: the dimension along which items are joined.
            minimum_batch_size: items that a consumer waits for.
            maximum_batch_size: items in one batch at the most.
            timeout_ms: after which one item is enough; None: the minimum is waited for.
            check_inputs: refuse items without a leaf or without a batch dimension.
            maximum_queue_size: items after which enqueue() blocks; None: never.

        Raises ValueError for sizes that contradict each other.
        """

    def enqueue(self, nest: _Nest, info: _Nest = ()) -> None:
        """Adds one item, and what travels beside it; blocks while the queue is full.

        Raises ValueError for an item that could not be joined with the first one this queue was
        given, ClosedBatchingQueue when the queue is closed, also while it waits.
        """

    def __iter__(self) -> BatchingQueue: ...
    def __next__(self) -> _Nest:
        """The oldest items, joined leaf by leaf. StopIteration when the queue is closed.

        What was handed over while a consumer waited still reaches it; the rest is dropped.
        """

    def with_info(self) -> Iterator[tuple[_Nest, _Nest]]:
        """Iterates over (nest, info): each joined along batch_dim."""

    def size(self) -> int:
        """Items that wait."""

    def is_closed(self) -> bool: ...
    def close(self) -> None:
        """Wakes everybody who waits. RuntimeError when it was closed already."""

@final
class Batch:
    """The joined inputs of several callers of DynamicBatcher.compute(), to be answered once.

    Dropped unanswered, its callers get AsyncError.
    """

    def get_inputs(self) -> _Nest:
        """The inputs; the same memory at every call."""

    def set_outputs(self, outputs: _Nest, version: int = 0) -> None:
        """Gives every caller its slice, along the batch dimension, of every leaf.

        The outputs may have another structure than the inputs, and no leaf at all. `version` is of
        the weights that computed them; an ActorPool writes it into its rollouts.

        Raises ValueError for a leaf of a wrong batch size, after which the batch can still be
        answered; RuntimeError when it is answered already.
        """

@final
class DynamicBatcher:
    """Joins what many threads want computed, and gives each its part of the answer.

        compute() \\                              / Batch.get_inputs()
        compute() -> [ inputs inputs ... ] -> next()
        compute() /                              \\ Batch.set_outputs()

    All methods may be called from any number of threads.
    """

    def __init__(
        self,
        batch_dim: int = 1,
        minimum_batch_size: int = 1,
        maximum_batch_size: int = 1024,
        timeout_ms: int | None = 100,
        check_outputs: bool = True,
    ) -> None:
        """Makes an open batcher.

        Args:
            batch_dim: the dimension along which inputs are joined and outputs sliced.
            minimum_batch_size: callers that next() waits for.
            maximum_batch_size: callers in one batch at the most.
            timeout_ms: after which one caller is enough; None: the minimum is waited for.
            check_outputs: refuse answers whose batch size is not the inputs'.

        Raises ValueError for sizes that contradict each other.
        """

    def compute(self, nest: _Nest) -> _Nest:
        """Blocks until the batch that these inputs become part of is answered.

        Raises ValueError for inputs that could not be joined with the first ones,
        ClosedBatchingQueue when the batcher is closed, AsyncError when the batch was dropped,
        TimeoutError after ten minutes.
        """

    def __iter__(self) -> DynamicBatcher: ...
    def __next__(self) -> Batch:
        """The next batch. StopIteration when the batcher is closed."""

    def size(self) -> int:
        """Callers that wait for a batch."""

    def is_closed(self) -> bool: ...
    def close(self) -> None:
        """Wakes everybody who waits; a batch handed out before may still be answered.

        RuntimeError when it was closed already.
        """

@final
class ActorPool:
    """Plays the environments of many servers, one thread for each stream.

    It asks the batcher with ((observation, reward, done, episode_step, episode_return),
    agent_state), leaves [1, B, ...] and [layers, B, ...], and expects ((action, ...), new_state).

    It enqueues (((observation, reward, done, episode_step, episode_return), (action, ...)),
    initial_agent_state), leaves [T + 1, B, ...]. Row t holds what the environment gave after an
    action, and the agent output with that action; row 0 repeats row T of the rollout before.

    Beside it travels a dict: "stream" and "rollout", int64 [1, B], number the environment and its
    rollouts; "policy_version" int64, "terminated", "truncated" and "episode_end" bool, [T + 1, B];
    "final_observation", leaves [1, K, ...], by column, then by row.
    """

    def __init__(
        self,
        unroll_length: int,
        learner_queue: BatchingQueue,
        inference_batcher: DynamicBatcher,
        env_server_addresses: Sequence[str],
        initial_agent_state: _Nest,
        *,
        rollout_columns: int = 0,
        seed: int = 0,
        connect_timeout_s: float = 60.0,
        step_timeout_s: float = 600.0,
        reconnect_timeout_s: float = 60.0,
    ) -> None:
        """Makes a pool; run() connects it.

        Args:
            unroll_length: T, steps in a rollout.
            learner_queue: takes the rollouts.
            inference_batcher: is asked for actions.
            env_server_addresses: one stream for each entry.
            initial_agent_state: of one environment, leaves [layers, 1, ...].
            rollout_columns: environments in one item, a divisor of each stream's; 0: all of them.
            seed: of the pool; each stream, and each connection of it, derives its own.
            connect_timeout_s: for each stream's server to be there at the start; a connection that
                is lost before its first step is tried again until then.
            step_timeout_s: for one step.
            reconnect_timeout_s: after which a lost stream ends the run when fewer than half of the
                streams live.

        Raises ValueError for impossible arguments.
        """

    def run(self) -> None:
        """Plays until queue or batcher are closed; to be called once.

        Raises the first failure that reconnecting does not mend, with the stream's address:
        RuntimeError with an environment's own traceback, ConnectionError, TimeoutError, ValueError
        for what servers or agent sent, AsyncError when a batch was dropped. Queue and batcher are
        closed then. Does not wait for batches that are held unanswered.
        """

    def count(self) -> int:
        """Environment steps in rollouts that were enqueued."""

    def steps(self) -> int:
        """Environment steps until now, those of unfinished and of dropped rollouts included."""

    def live_streams(self) -> int:
        """Streams that are connected."""

    def lost_streams(self) -> int:
        """How often a stream was lost so far."""

    def away_streams(self) -> list[tuple[str, float]]:
        """Address, and seconds since the loss, of each stream that is lost at this moment."""

    def seconds(self) -> dict[str, float]:
        """What all streams together have spent their time on since run() began: "environment"
        (stepping, or waiting for a server that is away), "inference" (waiting for actions),
        "queueing" (waiting for room in the learner queue).
        """

@final
class Server:
    """Serves environments to learners over gRPC, one for each stream."""

    def __init__(
        self,
        env_class: Callable[[], Any],
        server_address: str = "unix:/tmp/polybeast",
        *,
        env_id: str = "",
        num_streams: int = 1,
        description: dict[str, Any] | None = None,
        stop_timeout_s: float = 5.0,
    ) -> None:
        """Makes a server; run() starts it.

        Args:
            env_class: makes an environment; called once for each connection. An environment has
                Gymnasium's interface or old Gym's, or steps `num_envs` environments at once:
                reset(seed) gives leaves [num_envs, ...], step(action) gives (observation, reward,
                terminated, truncated, episode_end, final_observation or None).
            server_address: "unix:/path/of/socket" or "host:port".
            env_id: what describe() tells.
            num_streams: that a learner should open at once.
            description: what describe() tells, with its keys but without "protocol_version";
                "observation_space", "options" and "num_servers" may be left out. None: an
                environment is made to see.
        """

    def run(self) -> None:
        """Serves until stop(). Raises RuntimeError when it runs already.

        ConnectionError when the address cannot be bound or somebody serves it.
        """

    def stop(self) -> None:
        """Ends run(), also with clients connected; waits for the step an environment is in.

        RuntimeError when the server does not run. TimeoutError when an environment was still in a
        step after stop_timeout_s: run() has ended and the address is free, but the environment
        lives on, in its thread, until the step returns. It does not keep the process from ending.
        """

    def wait_until_serving(self, timeout_s: float = 10.0) -> bool:
        """Whether it serves, after at most `timeout_s` seconds."""

def describe(address: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """Asks the server at `address` what it serves.

    Returns a dict of "protocol_version" (0: a server of the original TorchBeast), "env_id",
    "num_envs" (of one stream), "num_streams", "num_servers" (started together with this one,
    itself included; 0: not told), "frame_stack", "observation" (a nest of (dtype, shape), of one
    environment and without stacking), "action_space" (a dict with "type", or None),
    "observation_space" (likewise: bounds and categories), "options" (a dict of how environments
    were made, or None).

    Raises TimeoutError when nobody answers, ValueError when the answer makes no sense,
    RuntimeError when the environment cannot be made.
    """
