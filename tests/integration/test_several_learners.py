# SPDX-License-Identifier: Apache-2.0
"""Two learners that torchrun starts, and environment servers of one machine."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

import psutil
import pytest
from background import wait_for
from ports import free_port, free_ports
from programs import LEARNING, MARKED, ONE_INCARNATION, SOON, Program, Workshop

from torchbeast.reporting.log_files import read_logs

pytestmark = pytest.mark.long

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--no-python"]
SMALL = ["--batch_size", "4", "--unroll_length", "10", "--model", "mlp", "--xpid", "a"]


@pytest.fixture
def servers(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.setenv("TMPDIR", str(workshop.folder))  # where a killed rank leaves its folder
    counts = ["--num_servers", "2", "--num_envs", "4"]
    started = workshop.start("polybeast_env", "--env", "Catch", *counts)
    started.wait_for("Serving 4 ")
    return started


def learners(torchrun: Program) -> list[psutil.Process]:
    """Returns the processes that torchrun has started, by rank."""
    found = psutil.Process(torchrun.pid).children()
    return sorted(found, key=rank_of)


def rank_of(learner: psutil.Process) -> int:
    wait_for(lambda: "RANK" in learner.environ())  # until then it is still a copy of torchrun
    return int(learner.environ()["RANK"])


@pytest.mark.parametrize("killed", [0, 1])
def test_torchrun_starts_all_learners_again_and_they_resume(
    workshop: Workshop, servers: Program, killed: int
) -> None:
    restarts = [*TORCHRUN[:-1], "--max_restarts=1", TORCHRUN[-1]]
    often = ["--checkpoint_interval", "1", "--total_steps", "20000"]
    both = workshop.start("polybeast_learner", *SMALL, *often, by=restarts)
    both.wait_for(LEARNING)
    both.wait_for(LEARNING)
    learners(both)[killed].kill()
    resumed = int(both.wait_for(r"Resuming .* at step ([\d,]+)")[1].replace(",", ""))
    assert both.end() == 0, both.said
    assert 0 < resumed < 20_000 and workshop.saved_step() == 20_000
    assert [row["step"] for row in read_logs(workshop.run_folder("a"))] == [*range(40, 20_001, 40)]


@pytest.mark.parametrize("killed", [0, 1])
def test_learners_on_several_machines_are_all_started_again_and_resume(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, killed: int
) -> None:
    """One torchrun for each machine. They keep the store of the first start."""
    monkeypatch.setenv("TMPDIR", str(workshop.folder))
    served, meeting = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    where = ["--num_servers", "1", "--num_envs", "2", "--listen", served, "--insecure"]
    workshop.start("polybeast_env", "--env", "Catch", *where).wait_for("Serving 2 ")
    torchrun = [*TORCHRUN[:3], "--nproc_per_node=1", "--nnodes=2", "--max_restarts=1"]
    torchrun += ["--rdzv_backend=c10d", f"--rdzv_endpoint={meeting}", TORCHRUN[-1]]
    run = [*SMALL, "--checkpoint_interval", "1", "--total_steps", "20000"]
    run += ["--env_servers", served, "--insecure"]
    both = [workshop.start("polybeast_learner", *run, by=torchrun) for _ in range(2)]
    wait_for(lambda: all(learners(each) for each in both), SOON)
    both.sort(key=lambda each: rank_of(learners(each)[0]))
    both[0].wait_for(LEARNING)
    both[0].wait_for(LEARNING)
    learners(both[killed])[0].kill()
    resumed = int(both[0].wait_for(r"Resuming .* at step ([\d,]+)")[1].replace(",", ""))
    assert [each.end() for each in both] == [0, 0], [each.said for each in both]
    assert 0 < resumed < 20_000 and workshop.saved_step() == 20_000


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_torchrun_ends_all_after_a_checkpoint(
    workshop: Workshop, servers: Program, number: signal.Signals
) -> None:
    both = workshop.start("polybeast_learner", *SMALL, "--total_steps", str(10**8), by=TORCHRUN)
    both.wait_for(LEARNING)
    both.send(number)
    assert both.end() == 1, "a code of torchrun's, which prints a traceback too"
    assert f"Stopped by {number.name}" in both.said and "SignalException" in both.said, both.said
    assert workshop.meta("a")["successful"] is True and workshop.saved_step() > 0


def test_torchrun_starts_all_learners_again_after_wrong_usage(workshop: Workshop) -> None:
    restarts = [*TORCHRUN[:-1], "--max_restarts=1", TORCHRUN[-1]]
    both = workshop.start("polybeast_learner", "--batch_size", "x", by=restarts)
    assert both.end() == 1, "a code of torchrun's"
    said = [line for line in both.said.splitlines() if line.startswith("polybeast_learner: Error")]
    assert len(said) == 2 and said[0] == said[1], both.said


def test_fewer_streams_than_learners_end_the_run_with_both_numbers(
    workshop: Workshop, servers: Program
) -> None:
    many = [*TORCHRUN[:3], "--nproc_per_node=5", TORCHRUN[-1]]
    five = workshop.start("polybeast_learner", *SMALL, "--batch_size", "5", by=many)
    assert five.end() == 1
    assert "5 learners need one stream of environments each" in five.said, five.said
    assert "the servers have 4 streams" in five.said


def host(workshop: Workshop, envs: int, *where: str) -> Program:
    """Starts a host with one server."""
    counts = ["--num_servers", "1", "--num_envs", str(envs)]
    started = workshop.start("polybeast_env", "--env", MARKED, *counts, *where, "--insecure")
    started.wait_for("Serving")
    return started


def goes_on_with(workshop: Workshop, streams: int) -> None:
    """Waits until so many are connected, and then for ten updates."""
    wait_for(lambda: workshop.last_row()["live_streams"] == streams, SOON)
    step = workshop.last_row()["step"]
    wait_for(lambda: workshop.last_row()["step"] > step + 10 * 40, SOON)


def end_both(
    workshop: Workshop, both: Program, servers: Sequence[Program], lost_streams: int = 0
) -> None:
    both.send(signal.SIGTERM)
    assert both.end() == 1 and "Stopped by SIGTERM" in both.said, both.said
    assert workshop.last_row()["lost_streams"] == lost_streams, both.said
    for each in servers:
        each.send(signal.SIGINT)
        assert each.end() == 0, each.said
    workshop.assert_nothing_is_left()


@pytest.fixture
def port(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of two free ports; each learner listens at the one after that of the one before."""
    monkeypatch.setenv("TMPDIR", str(workshop.folder))
    return free_ports(2)


def doors_of(port: int) -> str:
    return f"127.0.0.1:{port},127.0.0.1:{port + 1}"


def listening(port: int) -> list[str]:
    return ["--listen", f"127.0.0.1:{port}", "--insecure", "--connect_timeout", str(SOON)]


def test_two_learners_share_a_host_that_dials_in_and_one_goes_on_with_their_run(
    workshop: Workshop, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """An update is 40 steps with any number of learners."""
    hosts = [host(workshop, 4, "--learner", doors_of(port))]
    words = [*SMALL, *ONE_INCARNATION, *listening(port)]
    both = workshop.start("polybeast_learner", *words, "--total_steps", "2000", by=TORCHRUN)
    assert both.end() == 0, both.said
    assert f"--learner {doors_of(port)} --insecure" in both.said
    assert both.said.count("Saved to") == 1, "one of them says so"
    rows = list(read_logs(workshop.run_folder("a")))
    assert [row["step"] for row in rows] == [40 * (n + 1) for n in range(50)]
    assert rows[-1]["live_streams"] == 2, "one to each learner"
    assert workshop.saved_step() == 2000
    assert not list(workshop.folder.glob("torchbeast-rank*"))
    hosts += [host(workshop, 4, "--learner", f"127.0.0.1:{port}")]
    assert workshop.call("polybeast_learner", *words, "--total_steps", "2400") == 0
    assert "at step 2,000" in capsys.readouterr().out
    assert workshop.last_row()["step"] == 2400
    for each in hosts:
        assert each.end() == 0, each.said
    workshop.assert_nothing_is_left()


def test_hosts_that_dial_in_spread_their_streams_over_all_learners_and_may_leave(
    workshop: Workshop, port: int
) -> None:
    doors, listen = doors_of(port), listening(port)
    first = host(workshop, 2, "--learner", doors)
    both = workshop.start(
        *("polybeast_learner", *SMALL, *ONE_INCARNATION, *listen),
        *("--total_steps", str(10**8)),
        by=TORCHRUN,
    )
    both.wait_for(f"--learner {doors} --insecure")
    both.wait_for(LEARNING)
    second = host(workshop, 4, "--learner", doors)
    goes_on_with(workshop, 4)
    first.send(signal.SIGTERM)
    assert first.end() == 0, first.said
    goes_on_with(workshop, 2)
    end_both(workshop, both, [second], lost_streams=2)
