# SPDX-License-Identifier: Apache-2.0
"""A whole run with PPO that goes on from its checkpoint, with batches made by the test."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from later import later
from test_learner_run import EndingSource, agent, train_from
from test_off_policy_run import LEARNT, metrics
from test_training import B, T, rollout, states_equal

from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.storages.rollout import Rollout
from torchbeast.run import checkpoint as checkpoints

EPOCHS, PARTS, BATCHES = 3, 2, 5


def batch(number: int) -> Rollout:
    """The same for a number, whoever asks."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return rollout(float(number % 2))


def recurrent_batch(number: int) -> Rollout:
    """The same, with a state of the built-in LSTM of 128 units."""
    state = torch.full((1, B, 128), 0.1 * number)
    return dataclasses.replace(batch(number), initial_agent_state=(state, state))


def train(savedir: Path, make: Any, numbers: range, *words: str) -> dict[str, Any]:
    """A run, or its next part, that learns from the batches of these numbers; its checkpoint."""
    args = ["--savedir", str(savedir), "--xpid", "run", *words]
    flags = parse(MonoBeastFlags, "monobeast", args)
    train_from(lambda: EndingSource([make(n) for n in numbers]), flags, make=agent)
    return checkpoints.load(savedir / "run" / "model.tar")


@pytest.mark.parametrize(
    ("make", "words"),
    [later(batch, []), (recurrent_batch, ["--use_lstm"])],
    ids=["feed-forward", "recurrent"],
)
def test_a_run_that_goes_on_from_its_checkpoint_is_the_run_that_was_not_interrupted(
    tmp_path: Path, make: Any, words: list[str]
) -> None:
    """Weights, Adam's averages and counts, the order of shuffled steps, counters and log."""
    new = [*("--algo", "ppo", "--num_epochs", str(EPOCHS), "--num_mini_batch", str(PARTS))]
    new += ["--total_steps", str(10 * T * B), "--seed", "3", "--torch_threads", "1", *words]
    whole = train(tmp_path / "whole", make, range(BATCHES), *new)
    half = train(tmp_path / "parts", make, range(2), *new)
    both = train(tmp_path / "parts", make, range(2, BATCHES))
    for key in LEARNT:
        if key in whole:
            assert states_equal(both[key], whole[key]), key
            assert not states_equal(half[key], both[key]), key
    assert whole["optimizer_state_dict"]["state"][0]["step"] == BATCHES * EPOCHS * PARTS
    assert whole["scheduler_state_dict"] == {
        "steps": BATCHES * T * B,
        "learnt_steps": BATCHES * EPOCHS * T * B,
        "optimiser_steps": BATCHES * EPOCHS * PARTS,
        "schedule_starts": {},
        "version": BATCHES,
    }
    rows = [metrics(tmp_path / name / "run") for name in ("whole", "parts")]
    assert rows[0] == rows[1] and len(rows[0]) == BATCHES
    rates = [row["learning_rate"] / rows[0][0]["learning_rate"] for row in rows[0]]
    assert rates == pytest.approx([1.0, 0.9, 0.8, 0.7, 0.6])
    for name in ("approx_kl", "clip_fraction", "ratio", "explained_variance", "entropy"):
        assert name in rows[0][-1]
