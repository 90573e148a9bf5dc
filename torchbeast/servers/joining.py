# SPDX-License-Identifier: Apache-2.0
"""Hosts dial in to learners that cannot reach them: the host's side, and the learner's side.

    environments of a stream <- libtorchbeast.Host == rpc Join ==> libtorchbeast.Door of a learner
        -> JoinServer: described, compared with the run -> ActorPool, until the stream ends

A learner waits for the first host, and admits others at any time. A host cannot end the run: if it
does not fit, the learner warns, and tells the host why. The table of what a host can do wrong, and
of where each fault ends, is in libtorchbeast/README.md.

If a stream is lost, or if the learner refuses it, the host dials again, with exponential backoff.
docs/how-to/machines.md describes which errors end it instead.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import libtorchbeast
from torchbeast.core.base.checks import counted, first_of
from torchbeast.errors import RepeatedFailures, RunError, UsageError
from torchbeast.fleets.child_process import SendReport
from torchbeast.fleets.supervisor import RestartPolicy
from torchbeast.fleets.system import (
    allow_descriptors,
    allowed_descriptors,
    can_open_files,
    free_memory,
    in_bytes,
)
from torchbeast.fleets.waiting import say
from torchbeast.servers.addresses import PortCheck, check_free
from torchbeast.servers.config import SecurityConfig, most_streams
from torchbeast.servers.discovery import Description, ServerFleet, check_same, fleet_of
from torchbeast.servers.security import credentials, explain

_log = logging.getLogger("torchbeast.hosts")

_CONNECT_S = 5.0  # time limit for a learner to accept a connection
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0  # between attempts, with jitter
_GLANCE_S = 0.1
_SETTLED_S = 0.5  # at startup, hosts are complete when no stream has come for this time
_LOOK_S = 0.5  # between two checks of which hosts have joined
_MOST_BYTES = 7 << 30  # of a stream's rollout; the pool, which counts a little more, ends at 8 GiB
_MOST_STREAMS = 4096
_LONGEST = 2000  # characters of a reason against a host, which quotes what it sent
_MOST_TOLD = 1000  # different warnings that are remembered


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


class _Stream(NamedTuple):
    """A stream that waits to be admitted."""

    number: int
    host: str
    said: Description


class JoinServer:
    """Listens for hosts that dial in. Call `find`, then `follow`, each in one thread."""

    def __init__(self, listen: str, security: SecurityConfig) -> None:
        """Listens from now on.

        Raises UsageError if the address is in use, or if files cannot be used.
        """
        check_free(listen)
        allow_descriptors()
        self.listen, self._security = listen, security
        self._opening = threading.Lock()  # held while the door is replaced or closed
        self._is_closed = False
        self._door = self._open()
        self._waiting: list[_Stream] = []
        self._free = 0  # bytes of memory for all streams, written or not yet
        self._failures = RepeatedFailures()
        self._told: set[str] = set()  # warnings
        self._hosts: dict[str, int] = {}  # number of streams, as last reported
        self._seen: dict[str, int] = {}  # number of streams at the last check

    def _open(self) -> Any:
        try:
            door = libtorchbeast.Door(
                self.listen,
                max_streams=min(_MOST_STREAMS, most_streams()),
                credentials=credentials(self._security),
            )
        except ConnectionError as error:
            raise UsageError(str(error)) from None
        self._port = PortCheck(self.listen)
        return door

    def _next(self) -> _Stream | None:
        """Waits a moment for another stream. If the door does not accept any, opens another one.

        It waits until the process can open files again, because until then it would become deaf
        again, and streams that have joined continue.
        """
        if can_open_files() and self._port.is_deaf():
            self._open_again()
        stream = self._door.next(_GLANCE_S)
        return None if stream is None else _Stream(*stream)

    def _open_again(self) -> None:
        """Opens another door in place of a deaf one. If it cannot yet, the next call tries again:
        another program may have taken the port, or files with keys may just be replaced.
        """
        with self._opening:
            if self._is_closed:
                return
            self._warn(
                f"{self.listen} stopped accepting connections, so it is reopened and hosts dial in "
                f"again. Unknown clients may have exhausted the limit of {allowed_descriptors():,} "
                "open files and connections: block them from the port, or raise the limit (ulimit "
                "-n)"
            )
            self._door.close(run_has_ended=False)
            self._waiting.clear()
            try:
                self._door = self._open()
            except UsageError as error:
                self._warn(f"no host can dial in now: {error}")
                time.sleep(_GLANCE_S)

    def find(
        self,
        num_envs: int | None,
        timeout: float,
        check_goes_on: Callable[[], None],
        count_all: Callable[[int], int] = lambda own: own,
        min_streams: int = 1,
    ) -> ServerFleet:
        """Waits for hosts, and returns the fleet of their streams.

        num_envs: least number of environments; None: any number. timeout: seconds
        to wait for them. check_goes_on: raises RunError to stop waiting. count_all: returns the
        number of environments of all learners, given the number of this learner. min_streams: of
        this learner, without which its run would end.

        Raises RunError at the timeout.
        """
        deadline = time.monotonic() + timeout
        settled = deadline
        while True:
            if (stream := self._next()) is not None:
                if reason := _difference(self._waiting[0] if self._waiting else stream, stream):
                    self._refuse(stream, reason)  # it serves something else than those that wait
                else:
                    self._waiting.append(stream)
                settled = time.monotonic() + _SETTLED_S
            self._waiting = [stream for stream in self._waiting if self._door.waits(stream.number)]
            now, count = time.monotonic(), sum(stream.said["num_envs"] for stream in self._waiting)
            own = count if len(self._waiting) >= min_streams else 0
            found = count_all(own)  # in each round, as the others wait for it
            if self._waiting and now >= min(settled, deadline) and found >= (num_envs or 1):
                return self._fleet()
            check_goes_on()
            if now >= deadline:
                raise self._too_few(num_envs, timeout, min_streams, others_lack=own > found)

    def _fleet(self) -> ServerFleet:
        self._first = self._waiting[0]  # all others must serve the same
        streams = {
            f"{host} (stream {number})": {**description, "num_streams": 1}
            for number, host, description in self._waiting
        }
        return replace(fleet_of(streams), stream_hosts=[stream.host for stream in self._waiting])

    def _too_few(
        self, num_envs: int | None, timeout: float, min_streams: int, others_lack: bool
    ) -> RunError:
        names = ", ".join(sorted({stream.host for stream in self._waiting}))
        who = f"only {names} dialled in" if names else "no host dialled in"
        wanted = "" if num_envs is None else f", with fewer environments than --num_envs {num_envs}"
        if names and len(self._waiting) < min_streams:
            few = counted(len(self._waiting), "stream")
            wanted = f", with {few} of the {min_streams} that it needs (--min_streams)"
        if others_lack:
            who, wanted = f"{names} dialled in", ", but too few hosts at another learner"
        return RunError(
            f"{who} at {self.listen} within {timeout:g} s{wanted}: start python -m "
            "torchbeast.polybeast_env --learner HOST:PORT there, or use a longer --connect_timeout"
        )

    def follow(self, pool: Any, columns: int, env_bytes: int, closed: threading.Event) -> None:
        """Adds the waiting streams to a pool, and new streams as they come, until closed.

        columns: the number of environments of each stream must be a multiple of it. env_bytes: size
        of the rollout of one environment.
        """

        def consider(stream: _Stream) -> None:
            if reason := self._reason_against(stream, columns, env_bytes):
                self._refuse(stream, reason)
            else:
                self._door.take(stream.number, pool)

        for waiting in self._waiting:
            consider(waiting)
        next_look = 0.0
        while not closed.is_set():
            if (stream := self._next()) is not None:
                consider(stream)
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + _LOOK_S

    def _reason_against(self, stream: _Stream, columns: int, env_bytes: int) -> str:
        """Returns the reason if a stream does not fit the run, or ""."""
        if reason := _difference(self._first, stream):
            return reason
        envs = stream.said["num_envs"]
        if envs % columns:
            return (
                f"its streams have {envs} environments, and rollouts of this run combine "
                f"{columns}: start it with a multiple of {columns} per stream"
            )
        return self._lacks_memory(envs, env_bytes)

    def _lacks_memory(self, envs: int, env_bytes: int) -> str:
        """Returns an error message if the memory cannot hold the rollouts of a stream, or "".

        Streams write their rollouts row by row, and the system counts as free what they have not
        written yet.
        """
        size, free, left = envs * env_bytes, free_memory(), None
        if free is not None:
            played = env_bytes * sum(count for _, _, count in self._door.hosts())
            self._free = min(max(self._free, free), free + played)  # others may have taken some
            left = max(0, self._free - played)
        most = _MOST_BYTES if left is None else min(left, _MOST_BYTES)
        if size <= most:
            return ""
        what = "are left beside those of other streams" if most == left else "is the limit"
        return (
            f"the rollouts of a stream of {envs} environments would take {in_bytes(size)} of "
            f"memory, but {in_bytes(most)} {what}: serve fewer environments in a stream (more "
            "--num_servers), or shorten --unroll_length"
        )

    def _refuse(self, stream: _Stream, reason: str) -> None:
        reason = reason.encode(errors="backslashreplace").decode()  # it may quote half a character
        self._door.refuse(stream.number, reason)
        self._warn(f"ignoring the host {stream.host}: {reason}")

    def _warn(self, sentence: str) -> None:
        """Warns once with each sentence, because refused hosts dial again, and with not too many
        sentences, because a host may dial with another description each time.
        """
        if sentence not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(sentence)
            _log.warning("%s", sentence)

    def _look(self) -> None:
        """Reports which hosts have come and gone, when their number of streams is stable."""
        why = dict(self._door.ended())  # the last reason of each host
        for host, reason in why.items():
            if "Traceback" in reason:
                _log.warning("%s", self._failures.shortened(f"an environment of {host}: {reason}"))
        before, self._seen = self._seen, {host: count for host, count, _ in self._door.hosts()}
        changes = {
            host: count
            for host in sorted(before.keys() | self._seen.keys() | self._hosts.keys())
            if (count := self._seen.get(host, 0)) == before.get(host, 0)
            and count != self._hosts.get(host, 0)
        }
        self._tell(changes)

    def _tell(self, changes: dict[str, int]) -> None:
        """Reports hosts that have joined, left, or changed their number of streams, a line each."""
        joined = [host for host in changes if host not in self._hosts]
        left = [host for host, count in changes.items() if not count]
        others = [host for host in changes if host not in {*joined, *left}]
        self._hosts = {host: count for host, count in (self._hosts | changes).items() if count}

        for what, hosts in (("joined", joined), ("changed", others)):
            if hosts:
                named = [f"{host} ({counted(changes[host], 'stream')})" for host in hosts]
                say(f"{counted(len(hosts), 'host')} {what}: {first_of(named)}")
        if left:
            self._told.clear()
            _log.warning("%s left: %s", counted(len(left), "host"), first_of(left))
        if left and not self._hosts:
            _log.warning("no host is left; the run ends within a minute unless one dials in")

    def close(self, run_has_ended: bool) -> None:
        """Ends all streams; tells hosts whether the run has ended or they may dial again."""
        with self._opening:
            self._is_closed = True
            self._door.close(run_has_ended=run_has_ended)


def _difference(first: _Stream, other: _Stream) -> str:
    """Returns how another stream differs from the first one, or why its description is invalid; ""
    if both serve the same.
    """
    try:
        check_same(first.host, first.said, other.host, other.said)
        fleet_of({other.host: other.said})
    except RunError as error:
        why = str(error)
        half = _LONGEST // 2
        return why if len(why) <= _LONGEST else f"{why[:half]} ... {why[-half:]}"
    except RecursionError:
        return "its description is nested too deeply"
    return ""
