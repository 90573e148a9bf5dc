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
from torchbeast.sources.servers.config import LearnerSecurityConfig
from torchbeast.sources.servers.credentials import learner_credentials
from torchbeast.sources.servers.handshake import ClosedError, client_tls, explain

_CONNECT_S = 5.0  # for a learner to accept a connection
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # between two attempts
_CLOSED_S = 30.0  # of attempts that ended without a reason, until that is one
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
        security: LearnerSecurityConfig,
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
            self._run_has_ended = _Stream(self, learner).run() or self._run_has_ended
        except Exception as error:
            self._failure = self._failure or error
        self.stop()  # the run has ended for all, or none can go on

    # --- called by the streams

    @property
    def is_stopped(self) -> bool:
        """Whether the streams are to end."""
        return self._stopped.is_set()

    @property
    def has_joined(self) -> bool:
        """Whether a learner has taken any stream."""
        return self._has_joined

    def wait(self, seconds: float) -> None:
        """Waits, or until the streams are to end."""
        self._stopped.wait(seconds)

    def say(self, learner: str, sentence: str) -> None:
        """Says something about a learner."""
        self._say(learner, sentence)

    def joined(self, learner: str) -> None:
        """Notes that a learner has taken a stream."""
        self._has_joined = True
        self._say(learner, f"Connected to the learner at {learner}.")

    def play(self, learner: str, on_taken: Callable[[], None]) -> None:
        """Plays one stream until it ends, see `libtorchbeast.Host.play`."""
        host = libtorchbeast.Host(
            self._make,
            learner,
            description=self._description,
            name=socket.gethostname()[:64] or "host",
            credentials=learner_credentials(self._security),
        )
        with self._lock:
            if self.is_stopped:
                return
            self._hosts.add(host)
        try:
            host.play(_CONNECT_S, on_taken)
        finally:
            with self._lock:
                self._hosts.discard(host)

    def explain(self, learner: str) -> None:
        """Raises RunError if waiting does not mend why a learner cannot be reached."""
        explain(learner, self._security, client_tls(self._security))


class _Stream:
    """A stream of a process, which keeps joining a learner. Used by one thread."""

    def __init__(self, streams: JoiningStreams, learner: str) -> None:
        self._streams, self._learner = streams, learner
        self._pause = _FIRST_PAUSE_S
        self._closed_since: float | None = None  # every attempt ended without a reason
        self._failures: collections.deque[float] = collections.deque(maxlen=_MOST_FAILURES)

    def run(self) -> bool:
        """Joins again and again; returns whether the learner's run has ended."""
        while not self._streams.is_stopped:
            try:
                self._streams.play(self._learner, self._taken)
                return not self._streams.is_stopped
            except (OSError, ValueError, UsageError) as error:
                self._end_in_vain(error)
            except RuntimeError as error:
                self._count_failure(error)
            self._streams.wait(self._pause * random.uniform(0.5, 1.0))
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)
        return False

    def _taken(self) -> None:
        self._pause, self._closed_since = _FIRST_PAUSE_S, None
        self._streams.joined(self._learner)

    def _end_in_vain(self, error: Exception) -> None:
        """Says why an attempt failed; raises it instead if no other can help.

        A learner that was there once comes back, whatever uses its port or is wrong with the files
        meanwhile, so that no wrong start on its machine ends a fleet.
        """
        try:
            if not isinstance(error, ConnectionError):  # the token, the protocol, or the files
                raise error if isinstance(error, UsageError) else RunError(str(error))
            self._explain()
        except (RunError, UsageError) as final:
            if not self._streams.has_joined:
                raise final from None
            error = final
        self._streams.say(self._learner, f"{error}; dialling again.")

    def _explain(self) -> None:
        closed_since, self._closed_since = self._closed_since, None
        try:
            self._streams.explain(self._learner)
        except OSError:  # of the files, which the next attempt names
            return
        except ClosedError:  # a learner that ends at this moment does it too
            self._closed_since = closed_since or time.monotonic()
            if time.monotonic() - self._closed_since >= _CLOSED_S:
                raise

    def _count_failure(self, error: Exception) -> None:
        now = time.monotonic()
        self._failures.append(now)
        if len(self._failures) == _MOST_FAILURES and now - self._failures[0] < _FAILURES_S:
            raise RunError(f"failure {_MOST_FAILURES} within ten minutes: {error}")
