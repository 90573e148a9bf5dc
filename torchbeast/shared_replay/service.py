# SPDX-License-Identifier: Apache-2.0
"""A replay that several agents share, in a separate process on their machine; and its client.

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

import contextlib
import json
import logging
import os
import queue
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge, wait
from pathlib import Path
from typing import Any, BinaryIO

from torchbeast.collect.replay import JoinRequest, ReplayClosed, ReplayStats
from torchbeast.core.base.checks import require
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.child_process import ChildProcess, SendReport, end_all, run_child, take_stdin
from torchbeast.fleets.system import free_memory
from torchbeast.shared_replay.replay import SharedReplay, SharingAgent, Ticket, has_ended

_log = logging.getLogger("torchbeast.replay_service")

_MODULE = "torchbeast.shared_replay.service"
_START_S = 60.0
_ANSWER_S = 120  # longest wait for an answer, because the service may be busy with others
_WAITING = 100  # connections that wait to be accepted


class Service:
    """Serves a replay at a socket, with a thread for each agent. replay: the replay."""

    def __init__(self, path: Path, free_memory: Callable[[], int | None]) -> None:
        """Opens the socket, to which only the user can connect.

        free_memory: see SharedReplay. Raises OSError if the socket already exists.
        """
        self._key = secrets.token_bytes(32)
        self.replay = SharedReplay(free_memory)
        self._connections: set[Connection[Any, Any]] = set()
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
        try:
            while ends.fileno() not in wait([self._socket, ends.fileno()]):
                connection: Connection[Any, Any] = Connection(self._socket.accept()[0].detach())
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()
        finally:
            self._socket.close()
            for connection in list(self._connections):
                shut(connection)

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
        finally:
            self._connections.discard(connection)

    def _serve_agent(self, connection: Connection[Any, Any], joining: JoinRequest) -> None:
        try:
            ticket, stats = self.replay.join(joining)
        except (ValueError, MemoryError) as error:
            _log.warning("agent %s was refused: %s", joining.name, error)
            connection.send(ValueError(str(error)))
            return
        _log.info("agent %s has joined", joining.name)
        try:
            connection.send(stats)
            with contextlib.suppress(EOFError, ConnectionError):
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


def shut(connection: Connection[Any, Any]) -> None:
    """Ends all calls of a connection, even if they wait in another thread."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)


def key_path(path: str | Path) -> Path:
    """Returns the file of the key that belongs to a socket."""
    return Path(f"{path}.key")


class SharedReplayClient(SharingAgent):
    """An agent of a replay that serves at a socket.

    One thread makes all calls except `close`. If the service has ended, calls make the run fail.
    """

    def __init__(self, address: str, joining: JoinRequest) -> None:
        """Joins the replay that serves at the path of a socket.

        Raises UsageError if no replay serves there, or if it refuses this agent.
        """
        super().__init__(joining)
        self._address = address
        self._closed = threading.Event()
        try:
            self._connection = Client(address, "AF_UNIX", authkey=_key(address))
            self._connection.send(joining)
            answer: ReplayStats | ValueError = self._connection.recv()
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
        shut(self._connection)

    def _ask(self, method: str, argument: Any) -> Any:
        """Sends a request and returns its answer, unless it is closed meanwhile."""
        try:
            self._connection.send((method, argument))
            if not self._connection.poll(_ANSWER_S):
                raise RunError(
                    f"the shared replay {self._address} has not answered for {_ANSWER_S} s"
                )
            answer = self._connection.recv()
        except (OSError, EOFError) as error:
            if self._closed.is_set():
                raise ReplayClosed from None
            raise RunError(has_ended(self._address)) from error
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
        service = Service(path, free_memory)
        report({"serves": str(path)})
        service.run(stdin)

    try:
        return run_child(serve)
    finally:
        shutil.rmtree(path.parent, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
