# SPDX-License-Identifier: Apache-2.0
"""Sweeps of whole agents, and how they end."""

from __future__ import annotations

import signal

import pytest
from background import wait_for
from programs import Program, Workshop
from sweep_runs import REPLAY, SMALL, B, T, last_row, saved_step, steps, table


def sweep(workshop: Workshop, *words: str) -> Program:
    return workshop.start("sweep", *SMALL, *words)


def test_agents_are_trained_and_ranked(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", "entropy_cost=0.01,0.1", "--env", "Catch", "--total_steps", "800"]
    assert workshop.call("sweep.__main__", *SMALL, *words) == 0
    said = capsys.readouterr().out
    folder = workshop.run_folder("a")
    rows = table(folder)
    assert sorted(row["entropy_cost"] for row in rows) == ["0.01", "0.1"]
    assert [(row["rank"], row["state"], row["step"]) for row in rows] == [
        ("1", "done", "800"),
        ("2", "done", "800"),
    ]
    assert float(rows[0]["mean_return"]) >= float(rows[1]["mean_return"]) >= -1
    for word in (
        "Ranking by the median of the mean returns",
        "sweep.csv",
        "Plot: ",
        "entropy_cost",
    ):
        assert word in said, said
    assert "To continue" not in said and (folder / "sweep.png").exists()
    recorded = workshop.meta("a")
    assert workshop.call("sweep.__main__", "--name", "a") == 0
    assert "All 2 agents are complete" in capsys.readouterr().out
    assert workshop.meta("a") == recorded
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_complete_agents_go_on_to_more_steps(workshop: Workshop) -> None:
    words = ["--set", "entropy_cost=0.01,0.1", "--env", "Catch", "--total_steps", "800"]
    assert sweep(workshop, *words).end() == 0
    folder = workshop.run_folder("a")
    more = workshop.start("sweep", "--name", "a", "--total_steps", "1200")
    assert more.end() == 0, more.said
    for row in table(folder):
        agent = folder / row["agent"]
        assert steps(agent) == list(range(T * B, 1201, T * B)) and saved_step(agent) == 1200
        assert workshop.meta(f"a/{row['agent']}")["args"]["entropy_cost"] == float(
            row["entropy_cost"]
        )
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_ctrl_c_saves_every_agent_and_one_that_failed_says_why(workshop: Workshop) -> None:
    """The failed one does not end the other."""
    run = sweep(workshop, "--set", "env=environments:Raises,Catch", "--total_steps", "100000000")
    folder = workshop.run_folder("a") / "env=Catch"
    run.wait_for("env=environments_Raises-.*: failed: .*the joystick is gone")
    seen = len(steps(folder))
    wait_for(lambda: len(steps(folder)) > seen, timeout=100.0)
    run.send(signal.SIGINT)
    assert run.end() == 1, run.said
    for sentence in ("Stopped by SIGINT", "Ranking", "To continue:", "1 failed", "1 stopped"):
        assert sentence in run.said, run.said
    assert saved_step(folder) == steps(folder)[-1] > 0
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_agents_save_and_end_when_their_sweep_is_killed(workshop: Workshop) -> None:
    run = sweep(workshop, "--set", "seed=1,2", "--env", "Catch", "--total_steps", "100000000")
    folders = [workshop.run_folder("a") / f"seed={seed}" for seed in (1, 2)]
    wait_for(lambda: all(map(steps, folders)), timeout=100.0)
    run.send(signal.SIGKILL)
    run.end()
    workshop.assert_nothing_is_left()
    for folder in folders:
        assert saved_step(folder) == steps(folder)[-1]
        assert workshop.meta(f"a/{folder.name}")["successful"] is True


@pytest.mark.long
def test_agents_share_a_replay(workshop: Workshop) -> None:
    """Both find in it what both have inserted: more than either has collected."""
    run = sweep(workshop, *REPLAY, "--set", "seed=1,2", "--total_steps", "4000")
    assert run.end() == 0, run.said
    rows = table(workshop.run_folder("a"))
    assert [row["state"] for row in rows] == ["done", "done"]
    fills = [last_row(workshop.run_folder("a") / row["agent"])["replay_fill"] for row in rows]
    assert max(fills) * 100000 > 4000
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_the_death_of_the_shared_replay_ends_a_sweep_with_checkpoints(workshop: Workshop) -> None:
    run = sweep(workshop, *REPLAY, "--set", "seed=1,2", "--total_steps", "100000000")
    folders = [workshop.run_folder("a") / f"seed={seed}" for seed in (1, 2)]
    wait_for(lambda: all(map(steps, folders)), timeout=100.0)
    (replay,) = workshop.processes("torchbeast.collect.shared_replay")
    replay.kill()
    assert run.end() == 1, run.said
    assert "sweep: the shared replay: process" in run.said and "To continue:" in run.said
    for folder in folders:
        assert saved_step(folder) == steps(folder)[-1]
    workshop.assert_nothing_is_left()
