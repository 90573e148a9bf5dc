# SPDX-License-Identifier: Apache-2.0
"""The agent's side of a shared replay.

`SharingAgent` is the same for both transports. `SharedReplayClient` uses the socket of a process on
this machine, and `RayReplayClient` in schemes/ray_replay.py uses a Ray actor.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.nest_py import map_leaves2
from torchbeast.core.storages.rollout_store import Facts
from torchbeast.errors import RunError, UsageError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.replay import Arrays, Filled, ReplayClosed, finals_of, has_ended
from torchbeast.sources.sharing.service import Region, key_path
from torchbeast.sources.sharing.shared_replay import Figures, Joining

_ANSWER_S = 120  # longest wait for an answer: the service has others to answer first
_HANG_UP = getattr(select, "POLLRDHUP", 0)  # Linux tells of the end of the other side


class SharingAgent(ABC):
    """One agent's part of a shared replay; see Replay. It has joined when it is made.

    `insert` copies columns to `_inserted` [T+1, B, ...] and sends it. `fill` receives a batch
    [T+1, S, ...] and copies it to columns.
    """

    _joining: Joining
    _inserted: Arrays
    _figures: Figures

    @property
    def capacity(self) -> int:
        """The number of transitions for which there is room."""
        return self._joining.capacity

    @property
    def size(self) -> int:
        """The number of stored transitions, when the replay was last used."""
        return self._figures.size

    @property
    def episodes(self) -> int:
        """The number of episodes that could be sampled, when the replay was last used."""
        return self._figures.episodes

    def facts(self) -> Facts:
        """Returns the figures of the replay, of all agents together, when it was last used."""
        return Facts(self._figures.fill, self._figures.samples_per_insert)

    def insert(self, arrays: Arrays, columns: slice) -> None:
        """Stores columns of a batch; see Replay."""
        for name, nest in self._inserted.items():
            map_leaves2(lambda to, leaf: np.copyto(to, leaf[:, columns]), nest, arrays[name])
        self._figures = self._insert(finals_of(arrays, columns))

    def fill(self, arrays: Arrays, columns: slice, first_walk: int | None) -> Filled | None:
        """Writes windows into columns; see Replay."""
        filled, batch, self._figures = self._fill(first_walk)
        if filled is not None:
            for name, nest in batch.items():
                map_leaves2(lambda to, leaf: np.copyto(to[:, columns], leaf), arrays[name], nest)
        return filled

    @abstractmethod
    def _insert(self, finals: list[np.ndarray]) -> Figures:
        """Sends `_inserted` and its final observations."""

    @abstractmethod
    def _fill(self, first_walk: int | None) -> tuple[Filled | None, Arrays, Figures]:
        """Returns windows [T+1, S, ...] and what SharedReplay.fill returns."""


class SharedReplayClient(SharingAgent):
    """An agent of a replay that serves at a socket.

    Threads: one makes all calls but `close`; `start` adds one that notices the service's end.
    """

    def __init__(self, address: str, joining: Joining) -> None:
        """Joins the replay that serves at the path of a socket.

        Raises UsageError when nobody serves there, and when the replay refuses this agent.
        """
        self._address = address
        self._joining = joining
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the connection
        self._end: str | None = None  # why the connection ended, once that was asked
        self._socket = _connected(address)
        self._connection = Connection(os.dup(self._socket.fileno()))
        try:
            self._join()
        except BaseException:
            self._socket.close()
            self._connection.close()
            raise

    def start(self, supervisor: Supervisor) -> None:
        """Starts a thread that fails the run when the service ends, used or not."""
        if _HANG_UP:
            supervisor.start_thread("shared replay", self._wait_for_its_end)

    def close(self) -> None:
        """Leaves the replay, which ends every call; may be called by any thread, and again."""
        self._closed.set()
        with contextlib.suppress(OSError):  # the service has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def _join(self) -> None:
        try:
            with self._failing_as_run():
                key = _key(self._address)
                answer_challenge(self._connection, key)
                deliver_challenge(self._connection, key)
                self._connection.send(self._joining)
                self._figures = self._answer()
                descriptor = recv_handle(self._connection)
        except (ValueError, AuthenticationError) as error:
            raise UsageError(f"--replay_service {self._address}: {error}") from error
        try:
            self._region = Region(self._joining, descriptor)
        finally:
            os.close(descriptor)
        self._inserted = self._region.inserted

    def _insert(self, finals: list[np.ndarray]) -> Figures:
        figures: Figures = self._ask("insert", finals)
        return figures

    def _fill(self, first_walk: int | None) -> tuple[Filled | None, Arrays, Figures]:
        filled, figures = self._ask("fill", first_walk)
        return filled, self._region.filled, figures

    def _ask(self, method: str, argument: Any) -> Any:
        """Sends a request and returns its answer."""
        with self._failing_as_run(), self._lock:
            self._connection.send((method, argument))
            return self._answer()

    def _answer(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @contextlib.contextmanager
    def _failing_as_run(self) -> Iterator[None]:
        """Raises ReplayClosed once it is closed, and RunError where the service fails."""
        try:
            yield
        except BlockingIOError as error:
            raise RunError(
                f"the shared replay {self._address} has not answered for {_ANSWER_S} s"
            ) from error
        except (OSError, EOFError) as error:
            if self._closed.is_set():
                raise ReplayClosed from None
            raise RunError(self._ended()) from error

    def _ended(self) -> str:
        """Returns why the connection ended: as the service said at last, or that it ended."""
        with self._lock:
            if self._end is None:
                self._end = has_ended(self._address)
                with contextlib.suppress(OSError, EOFError):
                    self._end = str(self._connection.recv())
            return self._end

    def _wait_for_its_end(self) -> None:
        poll = select.poll()
        poll.register(self._socket, _HANG_UP)
        poll.poll()
        if not self._closed.is_set():
            raise RunError(self._ended())


def _key(address: str) -> bytes:
    """Returns the key of a service. Raises ValueError unless this user's service has made it."""
    with open(key_path(address), "rb") as file:
        is_own = os.fstat(file.fileno()).st_uid == os.getuid()
        require(is_own, f"{file.name} belongs to another user: join a replay that you have started")
        return file.read()


def _connected(address: str) -> socket.socket:
    """Returns a socket whose calls wait for a limited time, and then raise BlockingIOError."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _ANSWER_S, 0))
    try:
        connected.connect(address)
    except OSError as error:
        connected.close()
        raise UsageError(
            f"--replay_service {address}: no replay serves there ({error.strerror or error}); "
            "python -m torchbeast.sweep --shared_replay starts one and gives agents its address"
        ) from error
    return connected
