# SPDX-License-Identifier: Apache-2.0
"""Sweeps on a Ray cluster."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from background import wait_for
from programs import Program, Workshop
from ray_clusters import small_cluster
from sweep_runs import REPLAY, SMALL, last_row, saved_step, steps, table

pytestmark = pytest.mark.long

LATE = 100.0  # seconds, for processes to start and to learn beside each other
LONG = ["--total_steps", "100000000"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that no test starts or ends."""
    with small_cluster() as made:
        yield made


def sweep(workshop: Workshop, cluster: Any, *words: str) -> Program:
    return workshop.start("sweep", "--on", "ray", "--address", cluster.address, *words)


def begun(workshop: Workshop, cluster: Any, *words: str) -> tuple[Program, list[Path]]:
    """Starts a sweep of two agents, and returns it once both have learnt something."""
    seeds = ["--set", "seed=1,2"]
    run = sweep(workshop, cluster, *SMALL, *REPLAY, *seeds, *LONG, *words)
    folders = [workshop.run_folder("a") / f"seed={seed}" for seed in (1, 2)]
    wait_for(lambda: all(map(steps, folders)), timeout=LATE)
    return run, folders


def processes(name: str) -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if name in " ".join(process.info["cmdline"] or [])]


def agents(workshop: Workshop) -> list[psutil.Process]:
    """The processes of agents of this test's sweeps, in the order of their seeds."""
    found = processes(str(workshop.run_folder("a")))
    ours = [process for process in found if "torchbeast.sweep.agent_main" in process.cmdline()]
    return sorted(ours, key=lambda process: process.cmdline()[-1])


def assert_nothing_is_left(workshop: Workshop) -> None:
    actors = [*processes("ray::TorchBeastReplay"), *processes("ray::TorchBeastSweepAgent")]
    left = [*agents(workshop), *actors]
    _, alive = psutil.wait_procs(left, timeout=30)
    assert alive == []


def test_agents_share_a_replay_stop_with_ctrl_c_and_go_on(workshop: Workshop, cluster: Any) -> None:
    """Each finds more in the replay than it has collected itself."""
    run, folders = begun(workshop, cluster)
    run.send(signal.SIGINT)
    assert run.end() == 0 and "2 stopped" in run.said, run.said
    stopped = [steps(folder)[-1] for folder in folders]
    assert [saved_step(folder) for folder in folders] == stopped
    total = max(stopped) + 4000
    last = sweep(workshop, cluster, "--name", "a", "--total_steps", str(total))
    assert last.end() == 0, last.said
    assert [row["state"] for row in table(workshop.run_folder("a"))] == ["done", "done"]
    fills = [last_row(folder)["replay_fill"] for folder in folders]
    learnt = sum(total - before for before in stopped)
    assert learnt / 2 < max(fills) * 100000 <= learnt
    assert_nothing_is_left(workshop)


def test_agents_save_and_end_when_their_sweep_is_killed(workshop: Workshop, cluster: Any) -> None:
    run, folders = begun(workshop, cluster)
    run.send(signal.SIGKILL)
    run.end()
    assert "sweep: the program was killed" in run.said and "--name" in run.said, run.said
    assert_nothing_is_left(workshop)
    for folder in folders:
        assert saved_step(folder) == steps(folder)[-1] > 0


def test_a_killed_agent_fails_alone_and_the_death_of_the_replay_ends_the_sweep(
    workshop: Workshop, cluster: Any
) -> None:
    run, folders = begun(workshop, cluster)
    agents(workshop)[0].kill()
    run.wait_for(r"seed=1: failed: process \d+ was killed by SIGKILL")
    seen = len(steps(folders[1]))
    wait_for(lambda: len(steps(folders[1])) > seen, timeout=LATE)
    (replay,) = processes("ray::TorchBeastReplay")
    replay.kill()
    assert run.end() == 1, run.said
    died = r"sweep: the shared replay: its process \d+ has died"
    assert re.search(died, run.said) and "To continue:" in run.said, run.said
    assert "Traceback" not in run.said, run.said
    assert saved_step(folders[1]) == steps(folders[1])[-1]
    assert_nothing_is_left(workshop)
