# SPDX-License-Identifier: Apache-2.0
"""Lets an environment-server process dial in to learners, with one call per stream.

    environments of a stream <- libtorchbeast.Host == rpc Join ==> libtorchbeast.Door of a learner

If a stream is lost, or if the learner refuses it, it dials again, with exponential backoff.
docs/how-to/machines.md describes which errors end it instead.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import libtorchbeast
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.child_main import SendReport
from torchbeast.fleets.restarts import RestartPolicy
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.security import credentials, explain

_CONNECT_S = 5.0  # time limit for a learner to accept a connection
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # between attempts, with jitter


class JoiningStreams:
    """The streams of a process. One thread calls `run`; any thread may call other methods."""

    def __init__(
        self,
        make: Callable[[], Any],
        description: dict[str, Any],
        learners: Sequence[str],
        security: SecurityConfig,
        report: SendReport,
    ) -> None:
        """Does not connect yet.

        make: makes the environments of a stream. learners: HOST:PORT of each stream's learner.
        security: its files are read for each attempt, so that renewed files are used.
        report: called with messages about a learner, {"learner": ..., "said": ...}.
        """
        self._make, self._description, self._learners = make, description, list(learners)
        self._security, self._report = security, report
        self._lock = threading.Lock()
        self._stopped, self._may_dial = threading.Event(), threading.Event()
        self._hosts: set[libtorchbeast.Host] = set()

    def dial(self) -> None:
        """Lets the streams start dialling."""
        self._may_dial.set()

    def run(self) -> bool:
        """Plays until `stop` or the end of the learner's run; returns whether the run has ended.

        Raises RunError with the traceback if environments fail too often.
        """
        self._may_dial.wait()
        with ThreadPoolExecutor(len(self._learners)) as streams:
            return any(list(streams.map(self._run_stream, self._learners)))

    def stop(self) -> None:
        """Ends `run`. May be called before it, and again."""
        self._stopped.set()
        self._may_dial.set()
        with self._lock:
            for host in self._hosts:
                host.stop()

    def _run_stream(self, learner: str) -> bool:
        """Plays one stream; returns whether the learner's run has ended."""
        try:
            return self._join_again_and_again(learner)
        finally:
            self.stop()  # the run has ended, or no stream can continue

    def _join_again_and_again(self, learner: str) -> bool:
        pause, restart_policy = _FIRST_PAUSE_S, RestartPolicy()

        def taken() -> None:
            nonlocal pause
            pause = _FIRST_PAUSE_S
            self._say(learner, f"Connected to the learner at {learner}.")

        while not self._stopped.is_set():
            try:
                self._play(learner, taken)
                return not self._stopped.is_set()
            except (OSError, ValueError, UsageError) as error:
                self._say(learner, f"{self._explained(learner, error)}; reconnecting.")
            except RuntimeError as error:
                if restart_policy.too_many(error):
                    raise RunError(f"failure 5 within ten minutes: {error}") from None
            self._stopped.wait(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return False

    def _play(self, learner: str, on_taken: Callable[[], None]) -> None:
        """Plays one stream until it ends, see `libtorchbeast.Host.play`."""
        host = libtorchbeast.Host(
            self._make,
            learner,
            description=self._description,
            name=socket.gethostname()[:64] or "host",
            credentials=credentials(self._security),
        )
        with self._lock:
            if self._stopped.is_set():
                return
            self._hosts.add(host)
        try:
            host.play(_CONNECT_S, on_taken)
        finally:
            with self._lock:
                self._hosts.discard(host)

    def _say(self, learner: str, sentence: str) -> None:
        self._report({"learner": learner, "said": sentence})

    def _explained(self, learner: str, error: Exception) -> Exception:
        """Returns the reason why an attempt failed."""
        try:
            if isinstance(error, ConnectionError):  # not because of token, protocol or files
                explain(learner, self._security)
        except RunError as reason:
            return reason
        return error
