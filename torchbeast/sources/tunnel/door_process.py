# SPDX-License-Identifier: Apache-2.0
"""The learner's side of the door: starts its process, and knows which hosts are there."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torchbeast.errors import RunError
from torchbeast.processes.child_process import ChildProcess, Report, end_all
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.servers.addresses import new_door_folder
from torchbeast.sources.servers.asking_together import asked_together
from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.servers.discovery import (
    Asking,
    Fleet,
    Host,
    NoAnswerError,
    fleet_of_hosts,
)
from torchbeast.sources.tunnel.door import MOST_HOSTS, Visit
from torchbeast.sources.tunnel.place import check_room
from torchbeast.sources.tunnel.visitors import described

_log = logging.getLogger("torchbeast.door")

_POLL_S = 0.05
_ANSWER_S = 20.0  # for a server of a host, which is ready before it dials


class DoorProcess:
    """The process at which hosts dial in; it ends with the run, and the run with it."""

    def __init__(self, supervisor: Supervisor, listen: str, security: ServerSecurityConfig) -> None:
        """Starts the process. listen: HOST:PORT. Failures of the process are the run's."""
        self.listen = listen
        self._supervisor = supervisor
        self._lock = threading.Lock()
        self._visits: dict[str, Visit] = {}
        self._changes = 0
        self._is_closing = False
        self._ready = threading.Event()
        self._folder = new_door_folder()
        try:
            self._process = self._start(security)
        except BaseException:
            self._remove_folder()
            raise

    def _start(self, security: ServerSecurityConfig) -> ChildProcess:
        """Starts the process; raises UsageError if the path of the folder is too long."""
        check_room(self._folder)
        arguments = {
            "listen": self.listen,
            "folder": str(self._folder),
            "security": dataclasses.asdict(security),  # names of files only
        }
        return ChildProcess(
            "door",
            "torchbeast.sources.tunnel.door_main",
            arguments,
            on_report=self._report,
            on_end=lambda error: self._supervisor.fail(f"the door at {self.listen}", error),
            environment={"PYTHONPATH": ":".join(sys.path)},
        )

    def wait_ready(self) -> bool:
        """Waits until hosts can dial in; returns false if the run ended first."""
        while not self._ready.is_set():
            if self._supervisor.wait(_POLL_S):
                return False
        return True

    def tell(self, label: str, sentence: str) -> None:
        """Tells a host a sentence, if it is connected."""
        self._process.send({"tell": label, "sentence": sentence})

    def visits(self) -> list[Visit]:
        """Returns the latest visit of every host, the first to come first.

        One that has been away for long may be missing.
        """
        with self._lock:
            return list(self._visits.values())

    def here(self) -> list[Visit]:
        """Returns the hosts that are connected now."""
        return [visit for visit in self.visits() if visit.is_here]

    def is_latest(self, visit: Visit) -> bool:
        """Returns whether the host has neither come nor gone since this visit."""
        with self._lock:
            return self._visits.get(visit.label) is visit

    def changes(self) -> int:
        """Returns how often a host has come or gone."""
        with self._lock:
            return self._changes

    def close(self) -> None:
        """Tells the hosts that the learner has ended, and ends the process."""
        self._is_closing = True
        self._process.send({"ended": True})
        end_all([self._process])
        self._remove_folder()

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _report(self, report: Report) -> None:
        if "visit" not in report:
            self._ready.set()
            return
        visit = Visit(**report["visit"])
        with self._lock:
            self._visits[visit.label] = visit
            self._changes += 1
            self._forget_some()
        if visit.is_here:
            _log.info("the host %s has come, with %d servers", visit.label, len(visit.addresses))
        elif not self._is_closing:
            _log.warning("the host %s has gone: %s", visit.label, visit.why)

    def _forget_some(self) -> None:
        """Forgets hosts that are away, the first to have come first, where there are more than the
        door has places for: pods have other names every time.
        """
        away = [label for label, visit in self._visits.items() if not visit.is_here]
        for label in away[: max(0, len(self._visits) - MOST_HOSTS)]:
            del self._visits[label]


@contextmanager
def door(
    supervisor: Supervisor, listen: str, security: ServerSecurityConfig
) -> Iterator[DoorProcess]:
    """Opens a door for the duration of the block."""
    opened = DoorProcess(supervisor, listen, security)
    try:
        yield opened
    finally:
        opened.close()


def find_visitors(
    opened: DoorProcess, num_actors: int | None, timeout: float, stopped: Callable[[], bool]
) -> Fleet:
    """Waits for hosts, and returns the fleet of all that are there and have answered.

    num_actors: environments that there must be at least; None: those of one host.
    timeout: seconds to wait for them in all.

    Raises RunError at the timeout, when the run ends, and for hosts that serve different
    environments.
    """
    deadline, asked, known = time.monotonic() + timeout, 0, _KnownHosts(opened, stopped)
    while not stopped():
        if (changes := opened.changes()) != asked:
            asked = changes
            fleet = known.fleet(max(1.0, deadline - time.monotonic()))
            if fleet is not None and fleet.num_envs >= (num_actors or 1):
                return fleet
        if time.monotonic() > deadline:
            raise _too_few(opened, num_actors, timeout)
        time.sleep(_POLL_S)
    raise RunError("the run ended while it waited for hosts")


class _KnownHosts:
    """The hosts at a door, each asked only once for as long as its servers stay the same.

    So a host that comes and goes all the time costs the others nothing.
    """

    def __init__(self, opened: DoorProcess, stopped: Callable[[], bool]) -> None:
        """Knows no host yet."""
        self._opened, self._stopped = opened, stopped
        self._hosts: dict[str, Host] = {}

    def fleet(self, timeout: float) -> Fleet | None:
        """Returns the fleet of all that are there and have answered by now; None: there are none.

        timeout: seconds for each server, 20 at most. Raises RunError for hosts that do not fit
        together, and for one that stays and does not answer if no other has.
        """
        try:
            self._ask(timeout)
            here = [self._hosts[visit.label] for visit in self._opened.here() if self._knows(visit)]
            return fleet_of_hosts(here) if here else None
        except RunError as error:
            for visit in self._opened.here():
                self._opened.tell(visit.label, f"the learner ends, because {error}")
            raise

    def _ask(self, timeout: float) -> None:
        """Asks the hosts that have come, or have other servers than before."""
        due = {visit.label: visit for visit in self._opened.here() if not self._knows(visit)}
        answers = asked_together(lambda label: self._described(due[label], timeout), due)
        for label, answer in answers.items():
            try:
                self._hosts[label] = answer()
            except RunError as error:
                if not self._opened.is_latest(due[label]):
                    continue
                if not (isinstance(error, NoAnswerError) and self._hosts):
                    raise
                _log.warning("the run begins without the host %s: %s", label, error)

    def _knows(self, visit: Visit) -> bool:
        host = self._hosts.get(visit.label)
        return host is not None and list(host.servers) == list(visit.addresses)

    def _described(self, visit: Visit, timeout: float) -> Host:
        """Asks a host for as long as it stays."""
        asking = Asking(
            min(timeout, _ANSWER_S), lambda: self._stopped() or not self._opened.is_latest(visit)
        )
        return described(visit, asking)


def _too_few(opened: DoorProcess, num_actors: int | None, timeout: float) -> RunError:
    names = ", ".join(visit.label for visit in opened.here())
    found = f"only {names} dialled in" if names else "no host dialled in"
    wanted = "" if num_actors is None else f", with fewer than the {num_actors} of --num_actors"
    return RunError(
        f"{found} at {opened.listen} within {timeout:g} s{wanted}: start python -m "
        "torchbeast.polybeast_env --learner HOST:PORT there, or give a longer --connect_timeout"
    )
