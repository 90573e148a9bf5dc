# SPDX-License-Identifier: Apache-2.0
"""A program that evaluates a run of another while it trains."""

from __future__ import annotations

import signal

import pytest
import torch
from programs import Program, Workshop

from torchbeast.reporting.log_files import read_logs

SMALL = ["--num_envs", "4", "--batch_size", "4", "--unroll_length", "10", "--model", "mlp"]
OF_CATCH = ["--env", "Catch", *SMALL, "--torch_threads", "1", "--checkpoint_interval", "1"]
PROCESSES = {"monobeast": "--num_workers", "polybeast": "--num_servers"}
EVALUATED = r"^Step ([\d,]+): mean return"


def train(workshop: Workshop, steps: int, program: str = "monobeast") -> Program:
    processes = [PROCESSES[program], "1"]
    return workshop.start(
        program, "--xpid", "a", "--total_steps", str(steps), *OF_CATCH, *processes
    )


def follow(workshop: Workshop, program: str = "monobeast") -> Program:
    how = ["--xpid", "a", "--mode", "test", "--follow", "--num_episodes", "5"]
    return workshop.start(program, *how)


def evaluated(workshop: Workshop) -> list[dict[str, float]]:
    return list(read_logs(workshop.run_folder("a") / "evaluations.csv"))


def best(workshop: Workshop) -> dict:
    return torch.load(workshop.run_folder("a") / "evaluation_best.tar", weights_only=True)


@pytest.mark.long
@pytest.mark.parametrize("program", ["monobeast", "polybeast"])
def test_a_follower_begins_before_its_run_and_ends_with_it(
    workshop: Workshop, program: str
) -> None:
    follower = follow(workshop, program)
    follower.wait_for("Waiting for the first checkpoint")
    first = train(workshop, 10**8, program)
    for _ in range(2):
        follower.wait_for(EVALUATED)
    first.send(signal.SIGINT)
    assert first.end() == 0, first.said
    stopped_at = torch.load(workshop.run_folder("a") / "model.tar")["stats"]["step"]

    second = train(workshop, stopped_at + 400, program)  # before it is given up
    assert second.end() == 0, second.said
    assert follower.end() == 0, follower.said
    assert f"The run is complete ({stopped_at + 400:,} steps)." in follower.said
    rows = evaluated(workshop)
    steps = [row["step"] for row in rows]
    assert len(steps) >= 3 and steps == sorted(set(steps)) and steps[-1] == stopped_at + 400
    found = max(rows, key=lambda row: row["mean_episode_return"])
    assert best(workshop)["stats"]["step"] == found["step"]
    workshop.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_follower_and_not_the_run(
    workshop: Workshop, number: signal.Signals
) -> None:
    run = train(workshop, 10**8)
    follower = follow(workshop)
    follower.wait_for(EVALUATED)
    follower.send(number)
    assert follower.end() == 0, follower.said
    assert f"Stopped by {number.name}." in follower.said and "Traceback" not in follower.said
    assert best(workshop)["stats"]["step"] in [row["step"] for row in evaluated(workshop)]
    assert not list(workshop.run_folder("a").glob("*.tmp"))
    run.send(signal.SIGINT)
    assert run.end() == 0 and "Stopped by SIGINT" in run.said, run.said
