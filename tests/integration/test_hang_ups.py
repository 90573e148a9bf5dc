# SPDX-License-Identifier: Apache-2.0
"""The terminal of a program goes away, as when a session of ssh ends."""

from __future__ import annotations

import os
import pty
import select
import signal
import threading
from collections.abc import Iterator

import psutil
import pytest
from background import wait_for
from programs import SOON, Program, Workshop
from test_endings import SMALL

from torchbeast.reporting.log_files import read_logs

pytestmark = pytest.mark.long

ENDLESS = [*SMALL, "--xpid", "a", "--total_steps", str(10**8)]
LEARN = {
    "monobeast": ["--env", "Catch", "--num_workers", "1", *ENDLESS],
    "polybeast": ["--env", "Catch", "--num_servers", "2", *ENDLESS],
    "raybeast": ["--env", "Catch", "--num_workers", "2", *ENDLESS],
}


class Terminal:
    """A terminal whose output nobody keeps."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._ended, self._end = os.pipe()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Goes away: the programs in it get SIGHUP, and can print no more. A second call is a
        no-op.
        """
        if self._reader.is_alive():
            os.write(self._end, b"x")
            self._reader.join()
            for descriptor in (self.theirs, self._ours, self._ended, self._end):
                os.close(descriptor)

    def _read(self) -> None:
        while self._ended not in select.select([self._ours, self._ended], [], [])[0]:
            os.read(self._ours, 65_536)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def rows(workshop: Workshop) -> int:
    folder = workshop.run_folder("a")
    return len(list(read_logs(folder))) if (folder / "logs.csv").exists() else 0


def wait_for_more(workshop: Workshop) -> None:
    """Waits until the learner has learnt twice more."""
    before = rows(workshop)
    wait_for(lambda: rows(workshop) > before + 1, SOON)


def assert_saved(workshop: Workshop, program: Program) -> None:
    assert program.end() == 0
    assert workshop.meta("a")["successful"] is True and workshop.saved_step() > 0


@pytest.mark.parametrize("program", ["monobeast", "polybeast", "raybeast"])
def test_a_lost_terminal_ends_a_run_after_a_checkpoint(
    workshop: Workshop, terminal: Terminal, program: str
) -> None:
    if program == "raybeast":
        pytest.importorskip("ray")
    run = workshop.start(program, *LEARN[program], terminal=terminal.theirs)
    wait_for_more(workshop)
    terminal.close()
    assert_saved(workshop, run)
    workshop.assert_nothing_is_left()


def test_a_lost_terminal_ends_servers_and_their_learner_in_order(
    workshop: Workshop, terminal: Terminal
) -> None:
    """The servers go first. Their learner, in another terminal, ends with its own."""
    other = Terminal()
    counts = ["--num_servers", "2", "--num_envs", "4"]
    servers = workshop.start("polybeast_env", "--env", "Catch", *counts, terminal=terminal.theirs)
    learner = workshop.start("polybeast_learner", *ENDLESS, terminal=other.theirs)
    wait_for_more(workshop)
    terminal.close()
    assert servers.end() == 0
    assert workshop.servers() == []
    other.close()
    assert_saved(workshop, learner)
    workshop.assert_nothing_is_left()


@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
def test_a_run_under_nohup_outlives_its_terminal(
    workshop: Workshop, terminal: Terminal, program: str
) -> None:
    """`trap` leaves the output to the terminal, which nohup would send to a file."""
    by = ["sh", "-c", 'trap "" HUP; exec "$0" "$@"']
    run = workshop.start(program, *LEARN[program], by=by, terminal=terminal.theirs)
    wait_for_more(workshop)
    terminal.close()
    wait_for_more(workshop)
    run.send(signal.SIGHUP)
    wait_for_more(workshop)
    run.send(signal.SIGTERM)
    assert_saved(workshop, run)
    workshop.assert_nothing_is_left()


def test_processes_of_ray_go_on_without_the_terminal_until_the_learner_ends_them(
    workshop: Workshop,
) -> None:
    pytest.importorskip("ray")
    run = workshop.start("raybeast", *LEARN["raybeast"])
    wait_for_more(workshop)
    ours = psutil.Process(run.pid).children(recursive=True)
    needed = [process for process in ours if process.name() in ("raylet", "gcs_server")]
    assert len(needed) == 2
    for process in needed:
        process.send_signal(signal.SIGHUP)
    wait_for_more(workshop)
    assert psutil.STATUS_ZOMBIE not in [process.status() for process in needed]
    run.send(signal.SIGTERM)
    assert_saved(workshop, run)
