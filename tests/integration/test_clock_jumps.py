# SPDX-License-Identifier: Apache-2.0
"""Somebody sets the clock of the machines in the middle of a run, which changes nothing."""

from __future__ import annotations

import datetime
import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import background
import pytest
from keys_of_tests import Keys
from ports import free_ports
from programs import LEARNING, MARKED, ONE_INCARNATION, SOON, Program, Workshop
from set_clock import SetClock
from test_endings import catch
from test_machines import of_learner, of_servers

from torchbeast.reporting.log_files import read_logs

pytestmark = pytest.mark.long

DAY = 86_400


def wait_for(condition: Callable[[], Any]) -> None:
    background.wait_for(condition, SOON)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """The clock of every program that the test starts."""
    made = SetClock(tmp_path)
    for name, value in made.environ.items():
        monkeypatch.setenv(name, value)
    return made


def live_and_lost(workshop: Workshop) -> tuple[float, float]:
    """Returns the number of connected streams, and how often one was lost."""
    row = workshop.last_row()
    return row["live_streams"], row["lost_streams"]


def learns(workshop: Workshop, steps: int = 1) -> None:
    """Waits until so many more steps have been learnt."""
    before = workshop.last_row()["step"]
    wait_for(lambda: workshop.last_row()["step"] >= before + steps)


def goes_on(workshop: Workshop) -> None:
    """Waits until the run has learnt more and written another checkpoint."""
    checkpoint = workshop.run_folder("a") / "model.tar"
    wait_for(checkpoint.exists)
    saved = checkpoint.stat().st_ino
    learns(workshop)
    wait_for(lambda: checkpoint.stat().st_ino != saved)


def assert_the_log_is_sane(workshop: Workshop, seconds: float) -> None:
    """Checks the times and durations of a run that lasted no longer than that."""
    rows = list(read_logs(workshop.run_folder("a")))
    times = [row["_time"] for row in rows]
    assert len(times) > 2 and all(a <= b for a, b in itertools.pairwise(times))
    assert times[-1] - times[0] < seconds
    spent = [(k, v) for row in rows for k, v in row.items() if k.startswith(("time_", "update_s"))]
    assert spent and not [each for each in spent if not 0 <= each[1] < 100 * seconds]


@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
def test_a_run_goes_on_and_its_log_is_sane(
    workshop: Workshop, clock: SetClock, program: str
) -> None:
    began = time.monotonic()
    flags = ["--checkpoint_interval", "1", *ONE_INCARNATION]
    run = catch(workshop, "a", 10**8, *flags, program=program, env=MARKED)
    run.wait_for(LEARNING)
    for seconds in (DAY, -2 * DAY):
        clock.jump(seconds)
        goes_on(workshop)
    if program == "polybeast":
        assert live_and_lost(workshop) == (2, 0)
    run.send(signal.SIGTERM)
    assert run.end() == 0, run.said
    assert "Warning" not in run.said, run.said
    meta = workshop.meta("a")
    begun, ended = (datetime.datetime.fromisoformat(meta[f"date_{x}"]) for x in ("start", "end"))
    assert ended < begun, "the program has seen the jump"
    assert_the_log_is_sane(workshop, time.monotonic() - began)
    workshop.assert_nothing_is_left()


def test_a_server_that_dies_after_a_jump_back_is_replaced_and_learnt_from(
    workshop: Workshop, clock: SetClock
) -> None:
    """The clock is set back on and on, and so in the middle of every wait for the new server."""

    def set_back_and_see_it_is_back() -> bool:
        clock.jump(-60)
        return live_and_lost(workshop) == (2, 1)

    run = catch(workshop, "a", 10**8, *ONE_INCARNATION, env=MARKED)
    run.wait_for(LEARNING)
    clock.jump(-DAY)
    workshop.servers()[1].kill()
    run.wait_for("Starting a replacement")
    wait_for(set_back_and_see_it_is_back)
    run.send(signal.SIGTERM)
    assert run.end() == 0, run.said
    workshop.assert_nothing_is_left()


def test_hosts_and_a_learner_on_tls_reconnect_until_a_certificate_is_over(
    workshop: Workshop, clock: SetClock, tmp_path: Path
) -> None:
    """Open connections stay, lost ones come back; new ones need a certificate that is valid now."""
    keys, first, began = Keys(tmp_path / "keys"), free_ports(3), time.monotonic()

    def start(port: int) -> Program:
        args = ["--listen", f"127.0.0.1:{port}", "--num_servers", "1", *of_servers(keys)]
        servers = workshop.start("polybeast_env", "--env", MARKED, *args)
        servers.wait_for("Serving")
        return servers

    one, two = start(first), start(first + 1)
    named = ["--env_servers", f"127.0.0.1:{first},127.0.0.1:{first + 1}", *of_learner(keys)]
    small = ["--batch_size", "2", "--unroll_length", "10", "--torch_threads", "1"]
    endless = ["--total_steps", str(10**8), "--xpid", "a", "--checkpoint_interval", "1"]
    learner = workshop.start("polybeast_learner", *ONE_INCARNATION, *named, *small, *endless)
    learner.wait_for(LEARNING)
    for seconds in (DAY, -2 * DAY, DAY):
        clock.jump(seconds)
        goes_on(workshop)
        assert live_and_lost(workshop) == (2, 0)

    def end(servers: Program) -> None:
        servers.send(signal.SIGINT)
        assert servers.end() == 0, servers.said

    end(two)
    wait_for(lambda: live_and_lost(workshop) == (1, 1))
    learns(workshop, 1000)
    two = start(first + 1)
    wait_for(lambda: live_and_lost(workshop) == (2, 1))
    clock.jump(2 * DAY)
    workshop.servers()[1].kill()
    two.wait_for("Starting a replacement")
    wait_for(lambda: live_and_lost(workshop) == (1, 2))
    learns(workshop, 1000)
    assert live_and_lost(workshop) == (1, 2), "its certificate is over by the new clock"
    for program in (learner, one, two):
        program.send(signal.SIGINT)
        assert program.end() == 0, program.said
    assert_the_log_is_sane(workshop, time.monotonic() - began)
    workshop.assert_nothing_is_left()
