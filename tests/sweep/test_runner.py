# SPDX-License-Identifier: Apache-2.0
"""The runner, with children whose ends the test decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_child import SILENT, FakeChild
from sweeping import agent, log

from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import available_cores, environment_of_share
from torchbeast.reporting.run_folder import RunFolder
from torchbeast.sweep import __main__ as main
from torchbeast.sweep import runner as runners
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.runner import Asha, Runner, runner_here
from torchbeast.sweep.table import AgentRow, in_words

pytestmark = pytest.mark.usefixtures("fakes")


def rows_of(folder: Path, count: int) -> list[AgentRow]:
    return [AgentRow(agent(folder, seed=str(seed))) for seed in range(count)]


def runner(at_once: int, more: Sequence[str] = (), asha: Asha | None = None) -> Runner:
    return runner_here(at_once, at_once, more, asha)


def run(
    rows: list[AgentRow], at_once: int, script: list[Callable[[], None]], asha: Asha | None = None
) -> Supervisor:
    """Runs agents; after each round the next step of the script is taken."""
    supervisor, steps = Supervisor(), iter(script)
    runner(at_once, asha=asha).run(rows, supervisor, lambda: next(steps, lambda: None)())
    assert next(steps, None) is None, "the runner ended before the script"
    return supervisor


def end(index: int, report: dict[str, Any] | None = None) -> None:
    FakeChild.made[index].finish(report)


def states(rows: list[AgentRow]) -> list[str]:
    return [row.state for row in rows]


DONE = {"ended": True}


def test_so_many_agents_run_at_a_time_and_the_next_when_one_has_ended(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 4)
    rows[1].state = "done"  # by an earlier part of the sweep
    seen = []

    def see(index: int) -> None:
        seen.append(states(rows))
        log(rows[int(FakeChild.made[index].name[-1])].agent.folder, [(100, 1, 0.0)])
        end(index, DONE)

    run(rows, 2, [lambda: see(1), lambda: None, lambda: see(0), lambda: see(2)])
    assert seen == [
        ["running", "done", "running", "waiting"],
        ["running", "done", "done", "running"],
        ["done", "done", "done", "running"],
    ]
    assert states(rows) == ["done"] * 4 and len(FakeChild.made) == 3


def test_an_agent_that_fails_says_why_and_the_others_go_on(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 3)
    failed = {"ended": True, "why": "worker 0: ValueError: no\nSee /x/out.log for details"}
    run(
        rows,
        1,
        [lambda: end(0, failed), lambda: None, lambda: end(1), lambda: None, lambda: end(2, DONE)],
    )
    assert states(rows) == ["failed", "failed", "stopped"]
    assert rows[0].reason == "worker 0: ValueError: no"
    assert rows[1].reason == "process 1 was killed by SIGKILL"


def test_agents_are_given_further_flags_when_they_start(tmp_path: Path) -> None:
    rows, supervisor = rows_of(tmp_path, 2), Supervisor()
    runner(2, ["--replay_service=x"]).run(rows, supervisor, lambda: supervisor.stop("SIGINT"))
    assert [child.words[-1] for child in FakeChild.made] == ["--replay_service=x"] * 2


def test_a_stop_asks_all_agents_before_it_waits_for_any(tmp_path: Path) -> None:
    rows, supervisor = rows_of(tmp_path, 3), Supervisor()
    runner(2).run(rows, supervisor, lambda: supervisor.stop("SIGINT"))
    assert states(rows) == ["stopped", "stopped", "waiting"]
    assert len(FakeChild.made) == 2


def test_an_agent_that_could_not_save_in_time_has_failed_unless_it_had_learnt_nothing(
    tmp_path: Path,
) -> None:
    rows, supervisor = rows_of(tmp_path, 2), Supervisor()
    SILENT.update(row.agent.name for row in rows)
    log(rows[0].agent.folder, [(10, 0, 0.0)])
    runner(2).run(rows, supervisor, lambda: supervisor.stop("SIGINT"))
    assert states(rows) == ["failed", "stopped"]
    assert "did not save its checkpoint" in rows[0].why


def test_an_agent_that_was_stopped_before_it_went_on_has_not_failed(tmp_path: Path) -> None:
    (before,) = rows_of(tmp_path, 1)
    log(before.agent.folder, [(10, 0, 0.0)])
    SILENT.add(before.agent.name)
    row, supervisor = AgentRow(before.agent), Supervisor()
    runner(1).run([row], supervisor, lambda: supervisor.stop("SIGINT"))
    assert row.state == "stopped"


def test_an_agent_that_does_worse_than_others_is_asked_once_to_end_and_says_where(
    tmp_path: Path,
) -> None:
    rows = rows_of(tmp_path, 2)

    def learn() -> None:
        log(rows[0].agent.folder, [(40, 1, 1.0)])
        log(rows[1].agent.folder, [(41, 1, 0.0)])

    def ends() -> None:
        assert states(rows) == ["running", "running"]
        assert [child.times_asked for child in FakeChild.made] == [0, 1]
        end(1, DONE)
        end(0, DONE)

    run(rows, 2, [learn, lambda: None, ends], Asha(100))
    assert states(rows) == ["stopped", "stopped by the scheduler"]
    assert in_words(rows[1]) == "stopped by the scheduler at step 41"


def test_an_agent_waits_for_a_process_that_still_runs_in_its_folder(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 1)
    earlier = RunFolder(rows[0].agent.folder, {}, [])
    counts: list[int] = []

    def release() -> None:
        counts.append(len(FakeChild.made))
        assert in_words(rows[0]) == "waiting for another process in its folder"
        earlier.finish(successful=False)

    def begun() -> None:
        assert in_words(rows[0]) == "running"

    run(rows, 1, [lambda: None, release, begun, lambda: end(0, DONE)])
    assert counts == [0] and len(FakeChild.made) == 1


@pytest.mark.parametrize(
    ("agents", "parallel", "cores", "expected"),
    [
        (4, None, 2, "2 at a time, 1 core each"),
        (4, None, 16, "4 at a time, 4 cores each"),
        (1, None, 16, "1 at a time, 16 cores each"),
        (30, 30, 2, "30 at a time, 1 core each"),
        (30, 3, 16, "3 at a time, 5 cores each"),
        (2, 8, 16, "2 at a time, 8 cores each"),
    ],
)
def test_agents_at_a_time_share_the_cores(
    agents: int, parallel: int | None, cores: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "available_cores", lambda: cores)
    assert runner_here(agents, parallel).how == expected


def test_agents_of_a_sweep_that_continues_have_as_many_cores_as_the_others_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "available_cores", lambda: 8)
    rows = [AgentRow(agent(tmp_path, seed=str(seed))) for seed in range(4)]
    rows[0].state = "done"
    with ExitStack() as ending:
        runner, _ = main._runner(ending, rows, SweepConfig())
    assert runner.how == "4 at a time, 2 cores each"


def test_a_process_uses_the_share_of_cores_that_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("torchbeast.fleets.system._quotas", lambda root: [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert available_cores() == 8
    environment = environment_of_share(3)
    assert environment["OMP_NUM_THREADS"] == "3"
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert available_cores() == 3
    for wrong in ("99", "0", "x", ""):
        monkeypatch.setenv("TORCHBEAST_CORES", wrong)
        assert available_cores() == 8


def test_a_process_that_the_system_cannot_start_ends_the_sweep_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, supervisor, here = rows_of(tmp_path, 2), Supervisor(), runners.process_here

    def start(agent: Any, *how: Any) -> runners.Process:
        if agent is rows[1].agent:
            raise OSError(24, "Too many open files")
        return here(agent, *how)

    monkeypatch.setattr(runners, "process_here", start)
    runner(2).run(rows, supervisor, lambda: None)
    assert "Too many open files" in str(supervisor.failure)
    assert states(rows) == ["stopped", "waiting"] and FakeChild.made[0].asked


@pytest.mark.parametrize(("state", "code"), [("failed", 1), ("stopped", 0)])
def test_a_sweep_with_a_failed_agent_ends_with_exit_code_1(
    state: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(rows: list[AgentRow], *_: Any) -> None:
        for row in rows:
            row.state = "stopped"
        rows[-1].state = state

    monkeypatch.setattr(main, "_train", train)
    words = ["--set", "seed=1,2", "--preset", "catch", "--savedir", str(tmp_path), "--name", "s"]
    assert main.sweep(words).exit_code == code
