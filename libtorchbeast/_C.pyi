# SPDX-License-Identifier: Apache-2.0
"""The compiled part of libtorchbeast: queue, batcher, actor pool and environment server.

A nest is a leaf, a tuple or list of nests, or a dict of nests with string keys. Input leaves are
torch tensors on the CPU or numpy arrays of bool, (u)int8 to (u)int64 or float16 to float64, in any
layout; they are copied. Output leaves are torch tensors that share the core's memory; lists come
back as tuples, dicts with sorted keys. TypeError: a leaf of another type. ValueError: an array of
another dtype or byte order, or a nest that is cyclic or too deep.

Calls that wait release the GIL, and end when their object is closed.

In shapes, T is the unroll length, B the number of environments (columns), K the number of truncated
episodes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, final

_Nest: TypeAlias = Any  # nests are recursive and mixed, so no narrower type would be usable

class ClosedBatchingQueue(RuntimeError):
    """The queue or batcher was closed, before the call or while it waited."""

class AsyncError(RuntimeError):
    """The batch that compute() waited for was dropped without outputs."""

class NestError(ValueError):
    """A nest has another structure than expected, or is too deep. The message names the place."""

@final
class Credentials:
    """Secrets that protect TCP connections; `repr` tells only which there are.

    Of a client: with a ca it uses TLS, and the server's certificate must be signed by it and name
    the host. Of a server: with a certificate it uses TLS; with a ca too, it admits only clients
    with a certificate signed by it; with a token it admits only calls that carry it. Unix sockets
    use no TLS.
    """

    def __init__(
        self, *, ca: str = "", certificate: str = "", key: str = "", token: str = ""
    ) -> None:
        """Takes contents of files, not their names.

        Args:
            ca: certificates of authorities, PEM.
            certificate: this side's, then any between it and the authority's, PEM.
            key: of the certificate, without a password, PEM.
            token: printable ASCII without spaces.

        Raises ValueError for another token, and for a certificate without its key.
        """

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
        *,
        spare_columns: int = 0,
    ) -> None:
        """Makes an open queue.

        Args:
            batch_dim: the dimension along which items are joined.
            minimum_batch_size: number of items a consumer waits for.
            maximum_batch_size: most items in one batch.
            timeout_ms: time after which one item is enough; None: always wait for the minimum.
            check_inputs: refuse items without a leaf or a batch dimension.
            maximum_queue_size: number of items at which enqueue() blocks; None: unbounded.
            spare_columns: number of entries along batch_dim that every leaf of a batch has after
                those of its items, `info` included; uninitialised, for the consumer to fill.

        Raises ValueError for contradictory sizes.
        """

    def enqueue(self, nest: _Nest, info: _Nest = ()) -> None:
        """Adds one item and its further data `info`; blocks while the queue is full.

        Raises ValueError for an item that could not be joined with the queue's first,
        ClosedBatchingQueue if the queue is closed, or becomes closed while it waits.
        """

    def __iter__(self) -> BatchingQueue: ...
    def __next__(self) -> _Nest:
        """Removes the oldest items, joined leaf by leaf; StopIteration once the queue is closed.

        At the close, waiting consumers still get the items that are left; without any, items are
        dropped.
        """

    def with_info(self) -> Iterator[tuple[_Nest, _Nest]]:
        """Iterates over batches as (nest, info), each joined along batch_dim."""

    def size(self) -> int:
        """Returns the number of items in the queue."""

    def is_closed(self) -> bool: ...
    def close(self) -> None:
        """Closes the queue and wakes all waiting threads; RuntimeError if it was closed already."""

@final
class Batch:
    """The joined inputs of several callers of DynamicBatcher.compute(), to be answered once.

    If it is dropped without outputs, its callers get AsyncError.
    """

    def get_inputs(self) -> _Nest:
        """Returns the inputs, in the same memory at every call."""

    def set_outputs(self, outputs: _Nest, version: int = 0) -> None:
        """Gives every caller its slice, along the batch dimension, of every leaf.

        The outputs may have any structure, even one without leaves. `version` is the version of
        the weights that computed them; an ActorPool writes it into its rollouts.

        Raises ValueError for a leaf of another batch size, after which the batch can still be
        answered; RuntimeError if it was answered already.
        """

@final
class DynamicBatcher:
    """Joins the inputs of many threads into batches and gives each its slice of the outputs.

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
            minimum_batch_size: number of callers that next() waits for.
            maximum_batch_size: most callers in one batch.
            timeout_ms: time after which one caller is enough; None: always wait for the minimum.
            check_outputs: refuse outputs whose batch size differs from the inputs'.

        Raises ValueError for contradictory sizes.
        """

    def compute(self, nest: _Nest) -> _Nest:
        """Returns the outputs for these inputs; blocks until their batch is answered.

        Raises ValueError for inputs that could not be joined with the first ones,
        ClosedBatchingQueue if the batcher is closed, AsyncError if the batch was dropped,
        TimeoutError after ten minutes.
        """

    def __iter__(self) -> DynamicBatcher: ...
    def __next__(self) -> Batch:
        """Waits for the next batch; StopIteration once the batcher is closed."""

    def size(self) -> int:
        """Returns the number of callers that are not in a batch yet."""

    def is_closed(self) -> bool: ...
    def close(self) -> None:
        """Closes the batcher and wakes all waiting threads; RuntimeError if it was closed already.

        A batch handed out before may still be answered.
        """

@final
class ActorPool:
    """Collects rollouts from environment servers, with one thread per stream.

    It calls the batcher with ((observation, reward, done, episode_step, episode_return),
    agent_state), leaves [1, B, ...] and [layers, B, ...], and expects ((action, ...), new_state).

    It enqueues (((observation, reward, done, episode_step, episode_return), (action, ...)),
    initial_agent_state), leaves [T + 1, B, ...]. Row t holds the environment's output after an
    action, and the agent output that contained the action; row 0 repeats row T of the previous
    rollout.

    Hosts may join and leave at any time, see Door. A stream that was lost, or whose environments
    failed, connects again and gets new environments; a stream whose environments fail too often is
    retired. run() says which failures end it instead.

    The item's `info` is a dict. "stream" and "rollout", int64 [1, B], number the environment and
    its rollouts, from 0, with a number left out where the stream was lost or its environments
    failed; streams that join get numbers that no environment had before. "policy_version" is
    int64, "terminated", "truncated" and "episode_end" are bool, [T + 1, B]; "final_observation" has
    leaves [1, K, ...], by column, then by row. "info" is there if the servers have info keywords: a
    dict of float32 [T + 1, B] by keyword, NaN where no game ended.
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
        min_streams: int = 0,
        credentials: Credentials | None = None,
    ) -> None:
        """Makes a pool; run() connects it.

        Args:
            unroll_length: T, steps in a rollout.
            learner_queue: receives the rollouts.
            inference_batcher: computes the actions.
            env_server_addresses: one stream is opened for each entry, as in describe(); may be
                empty if hosts dial in, see Door.
            initial_agent_state: one environment's, leaves [layers, 1, ...].
            rollout_columns: environments per item, a divisor of each stream's; 0: all of them.
            seed: every connection of every stream derives its own seed from it.
            connect_timeout_s: time for each server to become reachable at the start; a connection
                lost before its first step is retried until then.
            step_timeout_s: time for one step.
            reconnect_timeout_s: time after which too few connected streams end the run.
            min_streams: how many must be connected, and not retired. 0: half of the streams that
                the pool has at the time, at least one.
            credentials: for all servers; None: TCP is neither encrypted nor authenticated.

        Raises ValueError for invalid arguments.
        """

    def run(self, report: Callable[[str], object] | None = None) -> None:
        """Collects until queue or batcher are closed. Call it once.

        report: called in this thread with a message about each failure of environments that does
            not end the run.

        Closes both and raises the first failure that another connection cannot fix, with the
        server's address: RuntimeError with an environment's traceback, ConnectionError,
        TimeoutError, ValueError for invalid data from servers or agent, AsyncError if a batch was
        dropped. Does not wait for batches that are still unanswered.

        Environments that raise, or take longer than step_timeout_s, end the run if their stream has
        not completed a rollout yet. Otherwise the stream gets new ones. It is retired after five
        such failures within ten minutes, or after ten connections in a row that ended before their
        first rollout.
        """

    def set_env_options(self, json: str) -> None:
        """Gives the environments of all streams options for their resets.

        Args:
            json: a JSON object. Streams that connect later get it before their first episode.
        """

    def count(self) -> int:
        """Returns the environment steps in rollouts that were enqueued."""

    def steps(self) -> int:
        """Returns all environment steps, including those of unfinished and dropped rollouts."""

    def live_streams(self) -> int:
        """Returns the number of connected streams."""

    def lost_streams(self) -> int:
        """Returns the number of times that a stream was lost."""

    def restarted_streams(self) -> int:
        """Returns the number of times that a stream's environments failed and it got new ones."""

    def retired_streams(self) -> int:
        """Returns the number of streams that are retired."""

    def away_streams(self) -> list[tuple[str, float, str]]:
        """Returns, for each stream lost at this moment, its address, the seconds since the loss,
        and the error that ended its last connection, possibly a traceback; "" if nobody answers.
        """

    def shortage(self) -> tuple[int, int, float] | None:
        """Returns (connected streams, needed streams, seconds until run() ends unless so many are
        connected by then) while fewer than min_streams are; else None.

        Streams that connect for the first time count as connected.
        """

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that all streams together have spent since run() began, by stage:
        "environment" (stepping, or waiting for a lost server), "inference" (waiting for actions),
        "queueing" (waiting for room in the learner queue).
        """

@final
class Server:
    """Serves environments to learners over gRPC: each stream gets its own."""

    def __init__(
        self,
        env_class: Callable[[], Any],
        server_address: str = "unix:/tmp/polybeast",
        *,
        env_id: str = "",
        num_streams: int = 1,
        max_streams: int = 1024,
        description: dict[str, Any] | None = None,
        stop_timeout_s: float = 5.0,
        credentials: Credentials | None = None,
    ) -> None:
        """Makes a server; run() starts it.

        Args:
            env_class: makes an environment; called once per stream. An environment has
                Gymnasium's interface or legacy Gym's, or steps `num_envs` environments at once:
                reset(seed), with 0 <= seed < 2**31, gives leaves [num_envs, ...], step(action)
                gives (observation, reward, terminated, truncated, episode_end, final_observation
                or None), and, if it likes, resets as in torchbeast.core.envs.VecStep. With
                info_keywords another value follows: float32 [N, K], a row for each environment with
                episode_end and a column for each keyword, or None if no game ended.
            server_address: "unix:/path/of/socket" or "host:port".
            env_id: the name that describe() returns.
            num_streams: the number of streams that a learner should open.
            max_streams: streams that may be open at once; further ones end with
                RESOURCE_EXHAUSTED, which a learner takes for a lost connection.
            description: the result of describe() without "protocol_version";
                "observation_space", "options", "num_servers" and "info_keywords" are optional.
                None: derived from an environment made for the purpose.
            stop_timeout_s: how long stop() waits for environments in the middle of a step.
            credentials: None: TCP is neither encrypted nor authenticated.
        """

    def run(self) -> None:
        """Serves until stop().

        Raises RuntimeError if it is running already, ConnectionError if the address is in use or
        cannot be bound.
        """

    def stop(self) -> None:
        """Ends run(), even while clients are connected; waits for environments in mid-step.

        Raises RuntimeError if the server is not running, TimeoutError if an environment is still
        in a step after stop_timeout_s: run() has then ended and the address is free, but the
        environment lives on, in its thread, until the step returns. That does not keep the process
        from ending.

        A signal handler may call it while the same thread is in run(): it then returns at once, and
        run() ends after the handler.
        """

    def wait_until_serving(self, timeout_s: float = 10.0) -> bool:
        """Waits until the server is serving; returns False after `timeout_s` seconds."""

@final
class Host:
    """Lets a learner, which this process dials, play environments."""

    def __init__(
        self,
        env_class: Callable[[], Any],
        learner_address: str,
        *,
        description: dict[str, Any],
        name: str,
        credentials: Credentials | None = None,
    ) -> None:
        """Opens nothing yet.

        Args:
            env_class: makes the environments of a stream, as for Server.
            learner_address: "host:port" of a Door.
            description: as for Server.
            name: of this machine, for the learner's user; 1 to 64 bytes.
            credentials: None: TCP is neither encrypted nor authenticated.
        """

    def play(self, timeout_s: float = 5.0, on_taken: Callable[[], object] | None = None) -> None:
        """Plays one stream until it ends; call it again for another.

        Args:
            timeout_s: to wait for a learner that accepts the connection.
            on_taken: called when the learner takes the stream.

        Returns if the learner's run has ended, or after stop(). Raises ConnectionError where it
        may be tried again: nobody answers, the connection was lost, or the learner does not use
        these environments now. Raises PermissionError for another token, ValueError if no learner
        listens there or the description makes no sense, RuntimeError with the traceback if an
        environment fails, which the learner hears too.
        """

    def stop(self) -> None:
        """Ends play(), and every later one at once. Waits for nothing."""

@final
class Door:
    """Listens for hosts that dial in, and lets an ActorPool play their streams.

    All methods may be called from any number of threads.
    """

    def __init__(
        self,
        address: str,
        *,
        max_streams: int = 1024,
        step_timeout_s: float = 600.0,
        credentials: Credentials | None = None,
    ) -> None:
        """Listens from now on.

        Args:
            address: "host:port".
            max_streams: that may be open at once; others are refused and may dial again.
            step_timeout_s: time for one step, after which its stream ends.
            credentials: of the side that listens; None: everyone is admitted.

        Raises ConnectionError if the address is in use or cannot be bound.
        """

    def next(self, timeout_s: float) -> tuple[int, str, dict[str, Any]] | None:
        """Returns the next stream that waits, each once: its number, the name of its host, and what
        describe() would return. None after the timeout, once the door is closed, and for a
        description that makes no sense, whose stream is refused.
        """

    def waits(self, stream: int) -> bool:
        """Returns whether a stream still waits."""

    def take(self, stream: int, pool: ActorPool) -> None:
        """Lets a pool play a stream until it ends. A no-op for one that has left."""

    def refuse(self, stream: int, reason: str) -> None:
        """Ends a stream that waits; its host hears the reason and may dial again."""

    def ended(self) -> list[tuple[str, str]]:
        """Returns the streams that were taken and have ended since the last call: the name of the
        host and why, possibly a traceback.
        """

    def hosts(self) -> list[tuple[str, int, int]]:
        """Returns the name of each host whose streams are played now, and the number of its streams
        and environments.
        """

    def close(self, *, run_has_ended: bool) -> None:
        """Ends all streams and waits for them: close the pool first.

        run_has_ended: hosts end too; else they may dial again.
        """

def describe(
    address: str, timeout_s: float = 60.0, credentials: Credentials | None = None
) -> dict[str, Any]:
    """Asks the server at `address` which environments it serves.

    address: "unix:/path/of/socket", "host:port", or "name@host:port", where the server's
    certificate must be for the name.

    Returns a dict of "protocol_version" (0: a server of the original TorchBeast), "env_id",
    "num_envs" (per stream), "num_streams" (to open), "num_servers" (started together, this one
    included; 0: unknown), "frame_stack", "observation" (a nest of (dtype, shape), of one
    environment, without stacking), "action_space" (a dict with "type", or None),
    "observation_space" (likewise: bounds and categories), "options" (a dict of the options that
    environments were made with, or None), "info_keywords" (a list of the numbers that it sends of
    the last info of each game).

    Raises TimeoutError if no server answers, PermissionError if it wants another token, ValueError
    for an invalid answer, RuntimeError if the environment cannot be made.
    """

def server_status(
    address: str, timeout_s: float = 60.0, credentials: Credentials | None = None
) -> dict[str, Any]:
    """Asks the server at `address` how busy it is.

    Returns a dict of "uptime_s", "open_streams" (whose environments exist now), "steps" (of
    environments, since the start) and "hosts": of a learner that hosts dial in to, a list of (name,
    streams, environments, seconds since it joined).

    Raises TimeoutError if no server answers, PermissionError if it wants another token, ValueError
    if it does not tell or the answer is invalid.
    """
