# SPDX-License-Identifier: Apache-2.0
"""The replay of an agent that is shared with others, in a process of its own on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchbeast.core.storages.chunk_ring import row_bytes
from torchbeast.errors import RunError, UsageError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.replay import Arrays, Filled, ReplayClosed, finals_of, has_ended
from torchbeast.sources.sharing.agent import SharingAgent, put_columns, take_columns
from torchbeast.sources.sharing.joining import Joining
from torchbeast.sources.sharing.messages import Message, Receiver, arrays_of, number, packed
from torchbeast.sources.sharing.regions import Region
from torchbeast.sources.sharing.shared_replay import Figures

_ANSWER_S = 120.0  # longest wait for an answer: the service has others to answer first
_LAST_WORDS = 10_000  # bytes, at most
_HANG_UP = getattr(select, "POLLRDHUP", 0)  # Linux tells of the end of the other side


class SharedReplayClient(SharingAgent):
    """One agent's part of a shared replay; see Replay. It has joined when it is made.

    Threads: one makes all calls but `close`; `start` adds one that notices the service's end.
    """

    def __init__(self, address: str, joining: Joining) -> None:
        """Joins the replay that serves at the path of a socket.

        Raises UsageError when nobody serves there, and when the replay refuses this agent.
        """
        self._address = address
        self._joining = joining
        self._closed = threading.Event()
        self._receiver = Receiver(self._payload_of)
        self._socket = _connected(address)
        try:
            self._join()
        except BaseException:
            self._socket.close()
            raise

    def start(self, supervisor: Supervisor) -> None:
        """Starts a thread that fails the run when the service ends, used or not."""
        if _HANG_UP:
            supervisor.start_thread("shared replay", self._wait_for_its_end)

    def insert(self, arrays: Arrays, columns: slice) -> None:
        """Stores columns of a batch; see Replay."""
        take_columns(arrays, columns, self._region.inserted)
        finals = finals_of(arrays, columns)
        count = len(finals[0]) if finals else 0
        self._ask({"do": "insert", "finals": count}, finals if count else [])

    def fill(self, arrays: Arrays, columns: slice, first_walk: int | None) -> Filled | None:
        """Writes windows into columns; see Replay."""
        answer = self._ask({"do": "fill", "first_walk": first_walk})
        begins, count = answer.header["begins"], answer.header.get("finals", 0)
        if begins is None:
            return None
        put_columns(self._region.filled, arrays, columns)
        return Filled(
            begins, arrays_of(answer.payload, self._joining.finals(count)) if count else []
        )

    def close(self) -> None:
        """Leaves the replay, which ends every call; may be called by any thread, and again."""
        self._closed.set()
        with contextlib.suppress(OSError):  # it has ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def _join(self) -> None:
        with self._failing_as_run():
            for piece in packed({"do": "join", **self._joining.as_json()}):
                self._socket.sendall(piece)
            first, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
            answer = self._received() if first else None
        if answer is None:
            raise RunError(self._ended())
        if "refused" in answer.header:
            raise UsageError(f"--replay_service {self._address}: {answer.header['refused']}")
        (descriptor,) = descriptors
        try:
            self._region = Region(self._joining, descriptor)
        finally:
            os.close(descriptor)
        self._figures = _figures_of(answer.header)

    def _ask(self, header: Mapping[str, Any], payload: list[np.ndarray] | None = None) -> Message:
        """Sends a request and returns its answer."""
        with self._failing_as_run():
            for piece in packed(header, payload or []):
                self._socket.sendall(piece)
            answer = self._received()
        if "refused" in answer.header:
            raise ValueError(answer.header["refused"])
        if "ended" in answer.header:
            raise RunError(answer.header["ended"])
        self._figures = _figures_of(answer.header)
        return answer

    def _received(self) -> Message:
        while (answer := self._receiver.receive(self._socket)) is None:
            pass
        return answer

    @contextlib.contextmanager
    def _failing_as_run(self) -> Any:
        """Raises ReplayClosed once it is closed, and RunError where the service fails."""
        try:
            yield
        except TimeoutError as error:
            raise RunError(
                f"the shared replay {self._address} has not answered for {_ANSWER_S:g} s"
            ) from error
        except OSError as error:
            if self._closed.is_set():
                raise ReplayClosed from None
            raise RunError(self._ended()) from error

    def _ended(self) -> str:
        """Returns why the connection ended: as the service said at last, or that it ended."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            # Any thread may look, and nothing is taken from the thread that reads answers.
            said = self._socket.recv(_LAST_WORDS, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return str(json.loads(said[said.index(b"{") :])["ended"])
        return has_ended(self._address)

    def _wait_for_its_end(self) -> None:
        poll = select.poll()
        poll.register(self._socket, _HANG_UP)
        poll.poll()
        if not self._closed.is_set():
            raise RunError(self._ended())

    def _payload_of(self, header: Mapping[str, Any]) -> int:
        """Returns the size of the payload that belongs to an answer."""
        if not header.get("begins"):
            return 0
        most = self._joining.unroll_length * self._joining.spare_columns
        return row_bytes(self._joining.finals(number(header, "finals", most)))


def _connected(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(address)
    except OSError as error:
        connection.close()
        raise UsageError(
            f"--replay_service {address}: no replay serves there ({error.strerror or error}); "
            "python -m torchbeast.sweep --shared_replay starts one and gives agents its address"
        ) from error
    return connection


def _figures_of(header: Mapping[str, Any]) -> Figures:
    return Figures(**{name: header[name] for name in Figures._fields})
