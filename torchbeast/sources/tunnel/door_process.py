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
from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.servers.discovery import Fleet
from torchbeast.sources.tunnel.door import Visit
from torchbeast.sources.tunnel.visitors import fleet_of_visits

_log = logging.getLogger("torchbeast.door")

_POLL_S = 0.05


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
        arguments = {
            "listen": listen,
            "folder": str(self._folder),
            "security": dataclasses.asdict(security),  # names of files only
        }
        self._process = ChildProcess(
            "door",
            "torchbeast.sources.tunnel.door_main",
            arguments,
            on_report=self._report,
            on_end=lambda error: supervisor.fail(f"the door at {listen}", error),
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
        """Returns the latest visit of every host, the first to come first."""
        with self._lock:
            return list(self._visits.values())

    def here(self) -> list[Visit]:
        """Returns the hosts that are connected now."""
        return [visit for visit in self.visits() if visit.is_here]

    def changes(self) -> int:
        """Returns how often a host has come or gone."""
        with self._lock:
            return self._changes

    def close(self) -> None:
        """Tells the hosts that the learner has ended, and ends the process."""
        self._is_closing = True
        self._process.send({"ended": True})
        end_all([self._process])
        shutil.rmtree(self._folder, ignore_errors=True)

    def _report(self, report: Report) -> None:
        if "visit" not in report:
            self._ready.set()
            return
        visit = Visit(**report["visit"])
        with self._lock:
            self._visits[visit.label] = visit
            self._changes += 1
        if visit.is_here:
            _log.info("the host %s has come, with %d servers", visit.label, len(visit.addresses))
        elif not self._is_closing:
            _log.warning("the host %s has gone: %s", visit.label, visit.why)


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
    """Waits for hosts, and returns the fleet of all that are there.

    num_actors: environments that there must be at least; None: those of one host.
    timeout: seconds to wait for them in all.

    Raises RunError at the timeout, when the run ends, and for hosts that serve different
    environments.
    """
    deadline, asked = time.monotonic() + timeout, 0
    while not stopped():
        changes, here = opened.changes(), opened.here()
        if here and changes != asked:
            asked = changes
            fleet = _fleet(opened, here, changes, max(1.0, deadline - time.monotonic()), stopped)
            if fleet is None:
                continue
            if fleet.num_envs >= (num_actors or 1):
                return fleet
        if time.monotonic() > deadline:
            raise _too_few(opened, num_actors, timeout)
        time.sleep(_POLL_S)
    raise RunError("the run ended while it waited for hosts")


def _fleet(
    opened: DoorProcess,
    here: list[Visit],
    changes: int,
    timeout: float,
    stopped: Callable[[], bool],
) -> Fleet | None:
    """Returns the fleet of these hosts; None if one did not answer and others are there by now.

    changes: as they were before `here` was looked up.
    """

    def is_outdated() -> bool:
        return opened.changes() != changes

    try:
        return fleet_of_visits(here, timeout, lambda: stopped() or is_outdated())
    except RunError as error:
        if is_outdated():
            return None
        for visit in here:
            opened.tell(visit.label, f"the learner ends, because {error}")
        raise


def _too_few(opened: DoorProcess, num_actors: int | None, timeout: float) -> RunError:
    names = ", ".join(visit.label for visit in opened.here())
    found = f"only {names} dialled in" if names else "no host dialled in"
    wanted = "" if num_actors is None else f", with fewer than the {num_actors} of --num_actors"
    return RunError(
        f"{found} at {opened.listen} within {timeout:g} s{wanted}: start python -m "
        "torchbeast.polybeast_env --learner HOST:PORT there, or give a longer --connect_timeout"
    )
