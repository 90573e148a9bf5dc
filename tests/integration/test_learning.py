# SPDX-License-Identifier: Apache-2.0
"""Toy tasks are learnt through real servers, sockets and processes."""

from __future__ import annotations

import re

import pytest
from programs import Workshop

FAST = [
    "--num_servers",
    "2",
    "--num_actors",
    "16",
    "--batch_size",
    "8",
    "--unroll_length",
    "20",
    "--learning_rate",
    "0.003",
    "--entropy_cost",
    "0.01",
    "--torch_threads",
    "1",
    "--seed",
    "1",
]
PAGE = 200.0


def mean_return(output: str) -> float:
    match = re.search(r"Mean (-?[\d.]+), median", output)
    assert match, output
    return float(match[1])


@pytest.mark.parametrize(
    ("env", "steps", "more"),
    [
        ("Catch", 50_000, ()),
        ("Catch", 80_000, ("--use_lstm",)),
        ("Memory", 50_000, ("--use_lstm",)),
    ],
    ids=["catch", "catch-lstm", "memory-lstm"],
)
def test_a_toy_task_is_learnt(
    workshop: Workshop, env: str, steps: int, more: tuple[str, ...]
) -> None:
    args = ["--env", env, "--xpid", "toy", "--total_steps", str(steps), *FAST, *more]
    code, said = workshop.run("polybeast", *args, timeout=PAGE)
    assert code == 0, said
    workshop.assert_nothing_is_left()
    code, said = workshop.run(
        "polybeast", "--mode", "test", "--xpid", "toy", "--num_episodes", "100", "--seed", "2"
    )
    assert code == 0, said
    assert mean_return(said) >= 0.9, said


def test_a_policy_without_memory_cannot_do_the_memory_task(workshop: Workshop) -> None:
    """Otherwise the test above would say nothing about the recurrent state."""
    args = ["--env", "Memory", "--xpid", "toy", "--total_steps", "20000", *FAST]
    code, said = workshop.run("polybeast", *args, timeout=PAGE)
    assert code == 0, said
    code, said = workshop.run(
        "polybeast", "--mode", "test", "--xpid", "toy", "--num_episodes", "100", "--seed", "2"
    )
    assert code == 0 and abs(mean_return(said)) < 0.5, said
