# SPDX-License-Identifier: Apache-2.0
"""Toy tasks are learnt through real processes, with shared memory or with servers and sockets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import Workshop

PAGE = 200.0


def mean_return(output: str) -> float:
    match = re.search(r"Mean (-?[\d.]+), median", output)
    assert match, output
    return float(match[1])


def evaluated(workshop: Workshop, program: str, preset: str, *flags: str) -> float:
    """Trains a preset; returns the mean return of 100 greedy episodes."""
    shared = ["--xpid", "toy", "--torch_threads", "1"]
    train = ["--preset", preset, "--seed", "1", *flags]
    code, said = workshop.run(program, *shared, *train, timeout=PAGE)
    assert code == 0, said
    assert workshop.meta("toy")["args"]["preset"] == preset
    workshop.assert_nothing_is_left()
    test = ["--mode", "test", "--num_episodes", "100", "--seed", "2"]
    code, said = workshop.run(program, *shared, *test)
    assert code == 0, said
    return mean_return(said)


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "preset"),
    [("monobeast", "catch"), ("polybeast", "catch"), ("polybeast", "memory")],
    ids=["mono-catch", "poly-catch", "poly-memory"],
)
def test_a_toy_task_is_learnt(workshop: Workshop, program: str, preset: str) -> None:
    assert evaluated(workshop, program, preset) >= 0.9


HELD_OUT = {  # nobody tuned the settings for them
    "environments:Poor,environments:Rich": (["--popart", "--total_steps", "100000"], [1, 500]),
    "environments:Delayed": (["--algo", "r2d2", "--total_steps", "30000"], [1]),
}


@pytest.mark.long
@pytest.mark.parametrize("program", ["monobeast", "polybeast", "raybeast"])
@pytest.mark.parametrize("env", HELD_OUT, ids=["two-tasks", "memory"])
def test_held_out_tasks_are_learnt(
    workshop: Workshop,
    program: str,
    env: str,
    runtime_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if program == "raybeast":
        pytest.importorskip("ray")
        monkeypatch.setenv("TMPDIR", str(runtime_folder))
    flags, best = HELD_OUT[env]
    run = ["--xpid", "a", "--torch_threads", "1", "--seed", "1"]
    code, said = workshop.run(program, *run, "--env", env, "--num_envs", "8", *flags, timeout=PAGE)
    assert code == 0, said
    code, said = workshop.run("monobeast", *run, "--mode", "test", "--num_episodes", "100")
    assert code == 0, said
    returns = [
        float(number) for number in re.findall(r"(?:mean return|^Mean) (-?[\d.]+)", said, re.M)
    ]
    assert all(r >= 0.9 * b for r, b in zip(returns, best, strict=True)), said


@pytest.mark.long
def test_a_policy_without_memory_fails_the_memory_task(workshop: Workshop) -> None:
    """Without this the test above would prove nothing about the recurrent state."""
    flags = ["--no_use_lstm", "--total_steps", "10000"]
    assert abs(evaluated(workshop, "monobeast", "memory", *flags)) < 0.5
