# SPDX-License-Identifier: Apache-2.0
"""Lets an environment-server process dial in to learners: each of its streams is a call of its own.

    environments of a stream <- libtorchbeast.Host == rpc Join ==> libtorchbeast.Door of a learner

A stream that is lost, or that the learner does not use, dials again, after pauses that grow; see
docs/machines.md for what ends it instead.
"""

from __future__ import annotations

import collections
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import libtorchbeast
from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers.config import SecurityConfig
from torchbeast.sources.servers.security import ClosedError, credentials, explain

_CONNECT_S = 5.0  # for a learner to accept a connection
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # between two attempts
_MOST_FAILURES, _FAILURES_S = 5, 600.0  # of environments of a stream, within this time

Say = Callable[[str, str], None]
"""Called with a learner and a sentence about it."""


class JoiningStreams:
    """The streams of a process. `run` belongs to one thread; any may call the other methods."""

    def __init__(
        self,
        make: Callable[[], Any],
        description: dict[str, Any],
        learners: Sequence[str],
        security: SecurityConfig,
        say: Say,
    ) -> None:
        """Opens nothing yet.

        make: makes the environments of a stream. learners: HOST:PORT of each stream's learner.
        security: its files are read again for each attempt, so renewed ones are used from then on.
        """
        self._make, self._description, self._learners = make, description, list(learners)
        self._security, self._say = security, say
        self._lock = threading.Lock()
        self._stopped, self._may_dial = threading.Event(), threading.Event()
        self._hosts: set[libtorchbeast.Host] = set()
        self._has_joined = False  # any stream, at least once
        self._run_has_ended = False
        self._failure: Exception | None = None

    def dial(self) -> None:
        """Lets the streams dial from now on."""
        self._may_dial.set()

    def run(self) -> bool:
        """Plays until `stop`, or the end of the learner's run; returns whether that has ended.

        Raises RunError or UsageError for what no attempt can mend, before any stream has joined,
        and RunError with the traceback of environments that fail too often.
        """
        self._may_dial.wait()
        streams = [
            threading.Thread(target=self._run_stream, args=(learner,), daemon=True)
            for learner in self._learners
        ]
        for stream in streams:
            stream.start()
        for stream in streams:
            stream.join()
        if self._failure is not None:
            raise self._failure
        return self._run_has_ended

    def stop(self) -> None:
        """Ends `run`. May be called before it, and again."""
        self._stopped.set()
        self._may_dial.set()
        with self._lock:
            for host in self._hosts:
                host.stop()

    def _run_stream(self, learner: str) -> None:
        try:
            self._join_again_and_again(learner)
        except Exception as error:
            self._failure = self._failure or error
        self.stop()  # the run has ended for all, or none can go on

    def _join_again_and_again(self, learner: str) -> None:
        """Joins until the learner's run has ended, or the streams are to end."""
        pauses = _Pauses()
        failures: collections.deque[float] = collections.deque(maxlen=_MOST_FAILURES)

        def taken() -> None:
            pauses.restart()
            self._has_joined = True
            self._say(learner, f"Connected to the learner at {learner}.")

        while not self._stopped.is_set():
            try:
                self._play(learner, taken)
                self._run_has_ended = self._run_has_ended or not self._stopped.is_set()
                return
            except (OSError, ValueError, UsageError) as error:
                self._end_in_vain(learner, error)
            except RuntimeError as error:
                _count_failure(failures, error)
            self._wait(pauses.next())

    def _wait(self, seconds: float) -> None:
        self._stopped.wait(seconds)

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

    def _end_in_vain(self, learner: str, error: Exception) -> None:
        """Says why an attempt failed; raises it instead if no other can help.

        A learner that was there once comes back, whatever uses its port or is wrong with the files
        meanwhile, so that no wrong start on its machine ends a fleet.
        """
        try:
            if not isinstance(error, ConnectionError):  # the token, the protocol, or the files
                raise error if isinstance(error, UsageError) else RunError(str(error))
            explain(learner, self._security)
        except ClosedError as likely:  # a learner that ends at this moment does it too
            error = likely
        except (RunError, UsageError) as final:
            if not self._has_joined:
                raise final from None
            error = final
        self._say(learner, f"{error}; dialling again.")


class _Pauses:
    """The pauses between two attempts, which grow. Used by one thread."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begins with the first one again."""
        self._next = _FIRST_PAUSE_S

    def next(self) -> float:
        """Returns the seconds of the next one, shortened at random."""
        pause, self._next = self._next, min(2 * self._next, _LONGEST_PAUSE_S)
        return pause * random.uniform(0.5, 1.0)


def _count_failure(times: collections.deque[float], error: Exception) -> None:
    """Counts a failure of a stream's environments; raises RunError if there are too many."""
    now = time.monotonic()
    times.append(now)
    if len(times) == _MOST_FAILURES and now - times[0] < _FAILURES_S:
        raise RunError(f"failure {_MOST_FAILURES} within ten minutes: {error}")
