# SPDX-License-Identifier: Apache-2.0
"""The check that tests of faults rely on refuses what it should, in a rollout and in a run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from environments import Marked
from later import later
from one_incarnation import check
from programs import ONE_INCARNATION, Workshop
from test_endings import SMALL


def marked(number: int, first: int, steps: int) -> torch.Tensor:
    """Returns what environment `number` observes in steps that begin at `first`: [steps, 2]."""
    env = Marked()
    env.number = number
    env.reset()
    for _ in range(first):
        env.step(0)
    return torch.from_numpy(np.stack([env.step(0)[0] for _ in range(steps)]))


@pytest.mark.parametrize("first", [0, 4090])  # the count of steps begins anew after 4096
def test_rollouts_of_one_environment_each_are_accepted(first: int) -> None:
    check(torch.stack([marked(1, first, 11), marked(2, 0, 11), marked(3, 95, 11)], dim=1))


@pytest.mark.parametrize("at", [1, 5, 10])
@pytest.mark.parametrize("column", [0, 2])
def test_a_column_that_goes_on_with_another_environment_is_refused(at: int, column: int) -> None:
    """Also where the second one has made as many steps as the first would have."""
    for steps_before in (0, 20 + at):
        columns = [marked(number, 20, 11) for number in range(3)]
        columns[column][at:] = marked(7, steps_before, 11 - at)
        with pytest.raises(ValueError, match="steps of two environments"):
            check(torch.stack(columns, dim=1))


@pytest.mark.parametrize("at", [1, 5, 10])
@pytest.mark.parametrize("column", [0, 2])
def test_a_column_with_a_step_too_few_or_too_many_is_refused(at: int, column: int) -> None:
    for begin in (at + 1, at - 1):
        columns = [marked(number, 4090, 12) for number in range(3)]
        columns[column][at:11] = columns[column][begin : begin + 11 - at].clone()
        with pytest.raises(ValueError, match="leaves out a step or has one twice"):
            check(torch.stack([each[:11] for each in columns], dim=1))


@pytest.mark.parametrize(
    ("program", "env", "sentence"),
    [
        later("polybeast", "LeavesOneOut", "leaves out a step"),
        later("polybeast", "Replaced", "has steps of two environments"),
        later("monobeast", "Replaced", "has steps of two environments"),
    ],
)
def test_a_run_with_such_a_rollout_ends(
    workshop: Workshop, program: str, env: str, sentence: str
) -> None:
    """The fault is in the 100th step of an environment, inside of a rollout of 7 steps."""
    flags = [*SMALL, "--unroll_length", "7", *ONE_INCARNATION, "--total_steps", "100000"]
    code, said = workshop.run(program, "--env", f"environments:{env}", "--xpid", "a", *flags)
    assert code == 1 and sentence in said, said
