# SPDX-License-Identifier: Apache-2.0
"""The agent's side of a shared replay.

`SharingAgent` is the same for both transports. `SharedReplayClient` uses the socket of a process on
this machine, and `RayReplayClient` in on_ray/replay.py uses a Ray actor.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from multiprocessing.reduction import recv_handle
from typing import Any

import numpy as np

from torchbeast.collect.replay import Arrays, Filled, ReplayClosed, finals_of, has_ended
from torchbeast.core.base.checks import require
from torchbeast.core.base.nest import map_leaves2
from torchbeast.core.storages.replay.store import Facts
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.shared_replay.replay import JoinRequest
from torchbeast.shared_replay.service import Region, key_path, shut

_ANSWER_S = 120  # longest wait for an answer, because the service may be busy with others


class SharingAgent(ABC):
    """One agent's client of a shared replay; see Replay. Its constructor joins the replay.

    `insert` copies columns to `_inserted` [T+1, B, ...] and sends it. `fill` receives a batch
    [T+1, S, ...] and copies it to columns.
    """

    _joining: JoinRequest
    _inserted: Arrays
    _facts: Facts

    def facts(self) -> Facts:
        """Returns metrics of the replay, over all agents, when it was last used."""
        return self._facts

    def insert(self, arrays: Arrays, columns: slice) -> None:
        """Stores columns of a batch; see Replay."""
        for name, nest in self._inserted.items():
            map_leaves2(lambda to, leaf: np.copyto(to, leaf[:, columns]), nest, arrays[name])
        self._facts = self._insert(finals_of(arrays, columns))

    def fill(self, arrays: Arrays, columns: slice, first_walk: int | None) -> Filled | None:
        """Writes windows into columns; see Replay."""
        filled, batch, self._facts = self._fill(first_walk)
        if filled is not None:
            for name, nest in batch.items():
                map_leaves2(lambda to, leaf: np.copyto(to[:, columns], leaf), arrays[name], nest)
        return filled

    @abstractmethod
    def _insert(self, finals: list[np.ndarray]) -> Facts:
        """Sends `_inserted` and its final observations."""

    @abstractmethod
    def _fill(self, first_walk: int | None) -> tuple[Filled | None, Arrays, Facts]:
        """Returns windows [T+1, S, ...] and the result of SharedReplay.fill."""


class SharedReplayClient(SharingAgent):
    """An agent of a replay that serves at a socket.

    One thread makes all calls except `close`. If the service has ended, calls make the run fail.
    """

    def __init__(self, address: str, joining: JoinRequest) -> None:
        """Joins the replay that serves at the path of a socket.

        Raises UsageError if no replay serves there, or if it refuses this agent.
        """
        self._address, self._joining = address, joining
        self._closed = threading.Event()
        try:
            self._connection = Client(address, "AF_UNIX", authkey=_key(address))
            self._facts = self._join()
        except (ValueError, AuthenticationError) as error:
            raise UsageError(f"--replay_service {address}: {error}") from error
        except (OSError, EOFError) as error:
            raise UsageError(
                f"--replay_service {address}: no replay is running there ({error!r}); python -m "
                "torchbeast.sweep --shared_replay starts one and gives agents its address"
            ) from error

    def start(self, supervisor: Supervisor) -> None:
        """Does nothing, because every update calls the service, and thereby notices its end."""

    def close(self) -> None:
        """Leaves the replay, which ends every call; any thread may call it, repeatedly."""
        self._closed.set()
        shut(self._connection)

    def _join(self) -> Facts:
        self._connection.send(self._joining)
        answer: Facts | ValueError = self._connection.recv()
        if isinstance(answer, ValueError):
            raise answer
        descriptor = recv_handle(self._connection)
        try:
            self._region = Region(self._joining, descriptor)
        finally:
            os.close(descriptor)
        self._inserted = self._region.inserted
        return answer

    def _insert(self, finals: list[np.ndarray]) -> Facts:
        return self._ask("insert", finals)

    def _fill(self, first_walk: int | None) -> tuple[Filled | None, Arrays, Facts]:
        filled, facts = self._ask("fill", first_walk)
        return filled, self._region.filled, facts

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
        require(is_own, f"{file.name} belongs to another user: join a replay that you have started")
        return file.read()
