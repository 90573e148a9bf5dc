# SPDX-License-Identifier: Apache-2.0
"""A replay that agents on a Ray cluster share, as a named Ray actor.

    with serving_on_ray("pong") as served:
        ...                                 agents run with --replay_service {served.address}
        if served.failure is not None: ...  it has died, and its agents end

    agent a --- insert: [T+1, B], through the object store --> TorchBeastReplay: SharedReplay
            <-- fill: [T+1, S], through the object store ---   one call after the other
    agent b <-> ...

Bounds: the actor has memory for the capacity, which it checks on its node, and for a batch of S
columns per agent. An agent has at most one open call.

The actor only learns of an agent's death when the agent joins again under its name, and keeps its
walks until then. Agents are trusted, because anyone with access to a Ray cluster can run code.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from typing import Any

from torchbeast.collect.replay import JoinRequest, Replay, ReplayClosed
from torchbeast.collect.shared_replay import Served, SharedReplay, SharedReplayClient, SharingAgent
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.waiting import waiting_for
from torchbeast.on_ray.connection import (
    FULL,
    connected,
    connected_ray,
    end_with,
    first_sentence,
    import_ray,
    runtime_env,
)

ON_RAY = "ray:"  # prefix of the address of a replay on Ray

_NAMESPACE = "torchbeast"  # of the names of Ray actors, shared by all programs
_START_S = 60.0
_ANSWER_S = 120.0  # longest wait for an answer, because the actor may be busy with others
_FULL = FULL.format("a smaller --batch_size, --replay_ratio or --unroll_length")
_WITHOUT_CLUSTER = (
    "start one with `ray start --head`, or set $RAY_ADDRESS to the cluster of the replay"
)


class TorchBeastReplay(SharedReplay):
    """A SharedReplay as a Ray actor. Ray's dashboard shows the name of this class.

    It executes calls one after the other, except `until_the_end`.
    """

    def pid(self) -> int:
        """Returns the actor's process ID."""
        return os.getpid()

    def until_the_end(self) -> None:
        """Never returns; the call ends with the actor."""
        threading.Event().wait()


class RayReplayClient(SharingAgent):
    """One agent's part of a shared replay on Ray; see Replay. It has joined when it is made.

    One thread makes all calls except `close`. If the actor has ended, calls make the run fail.
    """

    def __init__(self, name: str, joining: JoinRequest) -> None:
        """Joins the replay of this name in the cluster to which this process is connected.

        Raises UsageError if it does not exist, or if it refuses this agent.
        """
        super().__init__(ON_RAY + name, joining)
        self._closed: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            self._actor = import_ray().get_actor(name, namespace=_NAMESPACE)
        except ValueError as error:
            raise UsageError(
                f"replay_service {self._address}: the Ray cluster of this run has no replay of "
                "this name: select another cluster with $RAY_ADDRESS, or with RayBeast's --address"
            ) from error
        try:
            self._ticket, self._stats = self._call("join", joining)
        except ValueError as error:
            raise UsageError(f"replay_service {self._address}: {error}") from error

    def close(self) -> None:
        """Leaves the replay, which ends every call; any thread may call it, repeatedly."""
        with suppress(concurrent.futures.InvalidStateError):
            self._closed.set_result(None)
            end_with(self._actor.leave.remote, self._ticket)

    def _ask(self, method: str, argument: Any) -> Any:
        return self._call(method, self._ticket, argument)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the actor and returns its result, unless it is closed meanwhile."""
        if self._closed.done():
            raise ReplayClosed
        try:
            result = getattr(self._actor, method).remote(*arguments).future()
        except Exception as error:  # Ray raises anything, ConnectionError included
            raise self._failure(error) from error
        ends = [result, self._closed]
        concurrent.futures.wait(ends, _ANSWER_S, concurrent.futures.FIRST_COMPLETED)
        if self._closed.done():
            raise ReplayClosed
        if not result.done():
            raise self._no_answer(_ANSWER_S)
        if (failure := result.exception()) is not None:
            raise self._failure(failure) from None
        return result.result()

    def _failure(self, error: BaseException) -> Exception:
        """Returns the exception that the actor raised, or an error about its end."""
        from ray import exceptions

        if isinstance(error, (exceptions.ObjectStoreFullError, exceptions.OutOfDiskError)):
            return RunError(_FULL)  # raised here or in the actor, then also a RayTaskError
        if isinstance(error, exceptions.RayTaskError):
            cause: Exception = error.cause
            return cause if isinstance(cause, (ValueError, RunError)) else RunError(str(error))
        if isinstance(error, exceptions.RayActorError):
            return self._ended()
        return RunError(f"the shared replay {self._address}: {first_sentence(error)}")


def joined(address: str, joining: JoinRequest) -> AbstractContextManager[Replay]:
    """Joins the shared replay at an address, ray:NAME or the path of a socket, for a block."""
    if address.startswith(ON_RAY):
        return joined_on_ray(address, joining)
    return closing(SharedReplayClient(address, joining))


@contextmanager
def joined_on_ray(address: str, joining: JoinRequest) -> Iterator[RayReplayClient]:
    """Joins the replay at ray:NAME; leaves it after the block, and Ray if it was not connected.

    Uses this process's connection to Ray, or else the cluster in $RAY_ADDRESS, or else the cluster
    to which this machine belongs.
    """
    name = address.removeprefix(ON_RAY)
    with _connected(f"the run with --replay_service {address}"):
        with closing(RayReplayClient(name, joining)) as client:
            yield client


@contextmanager
def serving_on_ray(name: str, num_cpus: float = 1.0, node: str | None = None) -> Iterator[Served]:
    """Starts a shared replay as a Ray actor, and ends it with the block, or with this process.

    Uses this process's connection to Ray, or else connects as `joined_on_ray` does. num_cpus: that
    Ray reserves for it. node: ID of the node for it; by default Ray chooses.

    Raises UsageError if the name is in use, and RunError without a cluster or room in it.
    """
    with _connected(f"the program with the shared replay {ON_RAY}{name}", runtime_env(None)):
        actor, served = _started(name, num_cpus, node)
        try:
            yield served
        finally:
            served.is_over = True
            end_with(import_ray().kill, actor)


class _ServedOnRay(Served):
    """A shared replay on Ray. is_over: whether it is expected to end."""

    is_over = False

    def note_end(self, done: concurrent.futures.Future[Any]) -> None:
        """Notes the actor's end."""
        error = done.exception()
        if error is not None and not self.is_over:
            self.failure = RunError(f"its process {self.pid} has died: {first_sentence(error)}")


def _started(name: str, num_cpus: float, node: str | None) -> tuple[Any, _ServedOnRay]:
    """Starts the actor, and returns it when it answers."""
    ray = import_ray()
    options = {"name": name, "namespace": _NAMESPACE, "num_cpus": num_cpus, "max_restarts": 0}
    if node is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.method(concurrency_group="end")(TorchBeastReplay.until_the_end)
    made = ray.remote(concurrency_groups={"end": 1})(TorchBeastReplay)
    try:
        actor = made.options(**options).remote()
    except ValueError as error:
        raise UsageError(
            f"this cluster already has a replay {ON_RAY}{name}: use another name"
        ) from error
    served = _ServedOnRay(ON_RAY + name)
    try:
        with waiting_for(f"resources on the cluster for the shared replay {ON_RAY}{name}"):
            served.pid = ray.get(actor.pid.remote(), timeout=_START_S)
    except Exception as error:
        end_with(ray.kill, actor)
        if isinstance(error, ray.exceptions.GetTimeoutError):
            raise RunError(
                f"the shared replay {ON_RAY}{name} has not started within {_START_S:g} s: it needs "
                f"{num_cpus:g} free CPUs on one node"
            ) from error
        raise RunError(f"the shared replay {ON_RAY}{name}: {first_sentence(error)}") from error
    actor.until_the_end.remote().future().add_done_callback(served.note_end)
    return actor, served


def _connected(who: str, code: dict[str, Any] | None = None) -> AbstractContextManager[Any]:
    """Returns a context that is connected to Ray, by this process if it is.

    who: prefix of the message if Ray kills this process. code: to copy, see `runtime_env`.
    """
    if connected_ray() is not None:
        return nullcontext()
    at = os.environ.get("RAY_ADDRESS") or "auto"
    return connected(at, "$RAY_ADDRESS", _WITHOUT_CLUSTER, who, runtime_env=code)
