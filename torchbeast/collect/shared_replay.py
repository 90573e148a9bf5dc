# SPDX-License-Identifier: Apache-2.0
"""A replay that several agents share, in a separate process on their machine; and its client.

    agent 0 --- insert ---> one ring, first in first out <--- insert --- agent 1
            <-- windows --- drawn from the episodes of all --- windows -->

An agent sends a `JoinRequest` when it joins. The first agent decides what a row contains, and how
many rows there are. When an agent leaves or dies, its episodes stay. When it joins again under its
name, its new rollouts do not continue the old ones. `SharedReplay` and `SharingAgent` are without
transport; `on_ray/replay.py` has another one.

    with serving(folder) as served:
        ...                                 agents run with --replay_service {served.address}
        if served.failure is not None: ...  it has died, and its agents end

    agent a --- request --> [ thread of a ] --> SharedReplay
    agent b --- request --> [ thread of b ] --------+

Requests and answers are pickled. Before anything is unpickled, agent and service prove to each
other that they have the key, a file next to the socket that only the user can read. Then the agent
sends its JoinRequest, and the service answers with ReplayStats. After that the agent sends one
request at a time:

    ("insert", arrays)     --> the result of SharedReplay.insert
    ("fill", first_walk)   --> the result of SharedReplay.fill

If the answer is an exception, the agent raises it. The replay survives agents that die. When the
replay or its parent dies, the agents end with a checkpoint. The process ends when its standard
input does, which only its parent holds open.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import secrets
import shutil
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from torchbeast.collect import replay
from torchbeast.core.base.checks import require
from torchbeast.core.base.nest import map_leaves, map_leaves2
from torchbeast.core.envs.spaces import num_bytes
from torchbeast.core.storages.replay.rollout_replay import RolloutReplay
from torchbeast.core.storages.replay.store import bytes_per_transition
from torchbeast.errors import RunError, UsageError, started
from torchbeast.fleets.child_process import ChildProcess, SendReport, end_all, run_child, take_stdin
from torchbeast.fleets.system import check_memory, free_memory

_log = logging.getLogger("torchbeast.replay_service")

_MODULE = "torchbeast.collect.shared_replay"
_START_S = 60.0
_ANSWER_S = 120  # longest wait for an answer, because the service may be busy with others
_WAITING = 100  # connections that wait to be accepted
_AGAIN = "another run with the same name has joined the shared replay: use another --xpid"


class Ticket(NamedTuple):
    """Identifies one session of an agent, which passes it with every call."""

    agent: int  # its number, which stays the same for its name
    joined: int  # different for every session


class SharedReplay:
    """A RolloutReplay for several agents. Any thread may call it.

    Bounds: its memory is the memory of the capacity. When an agent leaves, its walks, and the
    environments whose rollouts may be continued, are dropped.
    """

    def __init__(self) -> None:
        """Makes a replay without memory. The first agent that joins determines its capacity."""
        self._lock = threading.RLock()
        self._replay: RolloutReplay  # made for the first agent
        self._first: replay.JoinRequest | None = None
        self._numbers: dict[str, int] = {}  # of agents, by name
        self._joined = itertools.count()
        self._windows: dict[Ticket, replay.Arrays] = {}  # of the agents that have joined

    def join(self, joining: replay.JoinRequest) -> tuple[Ticket, replay.ReplayStats]:
        """Adds an agent, which replaces an earlier agent with the same name.

        The ticket is valid until the agent is replaced or leaves.

        Raises ValueError, with a remedy, if the agent's rollouts do not fit into this replay, or if
        there is not enough memory for the first agent's.
        """
        with self._lock:
            if self._first is None:
                self._replay = self._made_for(joining)
                self._first = joining
            self._first.check_same(joining)
            number = self._numbers.setdefault(joining.name, len(self._numbers))
            for before in [ticket for ticket in self._windows if ticket.agent == number]:
                self._forget(before)
            ticket = Ticket(number, next(self._joined))
            windows = joining.batch(joining.spare_columns)
            self._windows[ticket] = map_leaves(lambda s: np.empty(s.shape, s.dtype), windows)
            return ticket, self.stats()

    def leave(self, ticket: Ticket) -> None:
        """Drops an agent's walks and open rollouts, unless it was replaced. Its episodes stay."""
        with self._lock:
            if ticket in self._windows:
                self._forget(ticket)

    def insert(self, ticket: Ticket, arrays: replay.Arrays) -> replay.ReplayStats:
        """Stores all columns of a batch; raises ValueError if this replay cannot store them.

        arrays: the fields of JoinRequest.batch, and final_observation.
        """
        with self._lock:
            self._check_present(ticket)
            self._replay.insert(arrays, ticket.agent)
            return self.stats()

    def fill(
        self, ticket: Ticket, first_walk: int | None
    ) -> tuple[replay.ReplayedColumns | None, replay.Arrays, replay.ReplayStats]:
        """Reads windows, see Replay.fill; returns (columns, windows [T+1, S, ...], stats), or
        (None, {}, stats).
        """
        with self._lock:
            self._check_present(ticket)
            windows = self._windows[ticket]
            columns = slice(0, windows["reward"].shape[1])
            filled = self._replay.fill(windows, columns, first_walk, ticket.agent)
            return filled, {} if filled is None else windows, self.stats()

    def stats(self) -> replay.ReplayStats:
        """Returns metrics for logs and for the agents."""
        with self._lock:
            return self._replay.stats()

    def _check_present(self, ticket: Ticket) -> None:
        """Raises RunError if another run has joined under the agent's name."""
        if ticket not in self._windows:
            raise RunError(_AGAIN)

    def _forget(self, ticket: Ticket) -> None:
        del self._windows[ticket]
        self._replay.new_source(ticket.agent)
        self._replay.forget_walks(ticket.agent)

    def _made_for(self, joining: replay.JoinRequest) -> RolloutReplay:
        fields = joining.batch(1)
        batches = (joining.columns + joining.spare_columns) * num_bytes(fields)
        each = bytes_per_transition(fields, joining.frame_stack)
        check_memory(joining.replay_size, each, batches, free_memory())
        try:
            return RolloutReplay(fields, joining.replay_size, joining.frame_stack, joining.seed)
        except MemoryError as error:
            raise ValueError(f"{error}: use a smaller replay_size") from error


class SharingAgent(ABC):
    """One agent's client of a shared replay; see Replay. Its constructor joins the replay.

    There is a subclass for each transport.
    """

    _stats: replay.ReplayStats

    def __init__(self, address: str, joining: replay.JoinRequest) -> None:
        self._address = address
        self._fields = *joining.batch(1), "final_observation"

    def _no_answer(self, seconds: float) -> RunError:
        """Returns the error about a replay that does not answer."""
        return RunError(f"the shared replay {self._address} has not answered for {seconds:g} s")

    def _ended(self) -> RunError:
        """Returns the error about a replay that has ended."""
        return RunError(
            f"the shared replay {self._address} has ended; progress is saved in the checkpoint. "
            "Continue the sweep that started the replay. Outside a sweep, resume with another "
            "--replay_service, or without one"
        )

    def stats(self) -> replay.ReplayStats:
        """Returns metrics of the replay, over all agents, when it was last used."""
        return self._stats

    def insert(self, arrays: replay.Arrays, *, priorities: replay.Priorities | None = None) -> None:
        """Stores a batch; see Replay. priorities: None, because nobody shares a replay that samples
        by them.
        """
        stored = {name: arrays[name] for name in self._fields}
        self._stats = self._ask("insert", map_leaves(np.ascontiguousarray, stored))

    def fill(
        self, arrays: replay.Arrays, columns: slice, first_walk: int | None
    ) -> replay.ReplayedColumns | None:
        """Writes windows into columns; see Replay."""
        filled: replay.ReplayedColumns | None
        filled, batch, self._stats = self._ask("fill", first_walk)
        for name, nest in batch.items():
            map_leaves2(lambda to, leaf: np.copyto(to[:, columns], leaf), arrays[name], nest)
        if filled is None:
            return None
        # A transport may deliver read-only arrays.
        return filled._replace(finals=[np.array(leaf) for leaf in filled.finals])

    @abstractmethod
    def _ask(self, method: str, argument: Any) -> Any:
        """Returns the result of this method of SharedReplay, for this agent."""


class Service:
    """Serves a replay at a socket, with a thread for each agent. replay: the replay."""

    def __init__(self, path: Path) -> None:
        """Opens the socket, to which only the user can connect. Raises OSError if it exists."""
        self._key = secrets.token_bytes(32)
        self.replay = SharedReplay()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            with open(key_path(path), "xb") as file:
                file.write(self._key)
            self._socket.bind(str(path))
        finally:
            os.umask(before)
        self._socket.listen(_WAITING)

    def run(self, ends: BinaryIO) -> None:
        """Serves agents until `ends` is readable."""
        with self._socket:
            while ends.fileno() not in wait([self._socket, ends.fileno()]):
                connection: Connection[Any, Any] = Connection(self._socket.accept()[0].detach())
                started(threading.Thread(target=self._serve, args=[connection], daemon=True))

    def _serve(self, connection: Connection[Any, Any]) -> None:
        """Serves one agent. Errors only end the connection of this agent."""
        try:
            with connection:
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
                self._serve_agent(connection, connection.recv())
        except (EOFError, OSError, AuthenticationError) as error:
            _log.warning("a connection was lost: %r", error)
        except Exception:
            _log.exception("an agent was disconnected")

    def _serve_agent(self, connection: Connection[Any, Any], joining: replay.JoinRequest) -> None:
        try:
            ticket, stats = self.replay.join(joining)
        except (ValueError, MemoryError) as error:
            _log.warning("agent %s was refused: %s", joining.name, error)
            connection.send(ValueError(str(error)))
            return
        _log.info("agent %s has joined", joining.name)
        try:
            connection.send(stats)
            with suppress(EOFError, ConnectionError):
                while True:
                    connection.send(self._answer(ticket, *connection.recv()))
        finally:
            self.replay.leave(ticket)
            _log.info("agent %s has left", joining.name)

    def _answer(self, ticket: Ticket, method: str, argument: Any) -> Any:
        try:
            if method == "fill":
                return self.replay.fill(ticket, argument)
            return self.replay.insert(ticket, argument)
        except (ValueError, RunError) as error:
            return error


def key_path(path: str | Path) -> Path:
    """Returns the file of the key that belongs to a socket."""
    return Path(f"{path}.key")


class SharedReplayClient(SharingAgent):
    """An agent of a replay that serves at a socket.

    One thread makes all calls except `close`. If the service has ended, calls make the run fail.
    """

    def __init__(self, address: str, joining: replay.JoinRequest) -> None:
        """Joins the replay that serves at the path of a socket.

        Raises UsageError if no replay serves there, or if it refuses this agent.
        """
        super().__init__(address, joining)
        self._closed = threading.Event()
        try:
            self._connection = Client(address, "AF_UNIX", authkey=_key(address))
            self._connection.send(joining)
            answer: replay.ReplayStats | ValueError = self._connection.recv()
            if isinstance(answer, ValueError):
                raise answer
            self._stats = answer
        except (ValueError, AuthenticationError) as error:
            raise UsageError(f"replay_service {address}: {error}") from error
        except (OSError, EOFError) as error:
            raise UsageError(
                f"replay_service {address}: no replay is running there ({error!r}); python -m "
                "torchbeast.sweep --shared_replay starts one and gives agents its address"
            ) from error

    def close(self) -> None:
        """Leaves the replay, which ends every call; any thread may call it, repeatedly."""
        self._closed.set()
        with suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, argument: Any) -> Any:
        """Sends a request and returns its answer, unless it is closed meanwhile."""
        try:
            self._connection.send((method, argument))
            if not self._connection.poll(_ANSWER_S):
                raise self._no_answer(_ANSWER_S)
            answer = self._connection.recv()
        except (OSError, EOFError) as error:
            if self._closed.is_set():
                raise replay.ReplayClosed from None
            raise self._ended() from error
        if isinstance(answer, Exception):
            raise answer
        return answer


def _key(address: str) -> bytes:
    """Returns the key of a service. Raises ValueError unless this user's service made it."""
    with open(key_path(address), "rb") as file:
        is_own = os.fstat(file.fileno()).st_uid == os.getuid()
        require(is_own, f"{file.name} belongs to another user: join a replay that you started")
        return file.read()


@dataclass
class Served:
    """A running shared replay.

    address: for --replay_service. pid: of its process. failure: how it died; None if it is alive.
    """

    address: str
    pid: int = 0
    failure: Exception | None = None


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Starts a shared replay on this machine, and ends it with the block.

    folder: for its socket; created for this user only, and removed at the end. Its path must be
    short, because paths of Unix sockets are limited.

    Raises RunError if the process does not start. If this process dies, the process ends and
    removes the folder.
    """
    folder.mkdir(mode=0o700, parents=True)
    served = Served(str(folder.absolute() / "replay.sock"))
    first: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def note_end(error: Exception) -> None:
        served.failure = error
        first.put(error)

    arguments = {"path": served.address}
    child = ChildProcess("shared replay", _MODULE, arguments, lambda _: first.put(None), note_end)
    try:
        try:
            error = first.get(timeout=_START_S)
        except queue.Empty:
            error = RunError(f"the shared replay has not started within {_START_S:g} s")
        if error is not None:
            raise error
        served.pid = child.pid
        yield served
    finally:
        end_all([child])
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: dict[str, Any]) -> int:
    """Serves until the parent ends or closes the standard input; then removes the folder."""
    path = Path(arguments["path"])

    def serve(report: SendReport) -> None:
        stdin = take_stdin()
        logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
        service = Service(path)
        report({"serves": str(path)})
        service.run(stdin)

    try:
        return run_child(serve)
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
