# SPDX-License-Identifier: Apache-2.0
"""A whole run of the toy off-policy algorithm, from its flags to its checkpoint and on from there:
the program's own settings, assembly, training loop, log and files, with transitions made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from off_policy import ACTOR_RATE, LinearActor, Toy, two_transitions
from test_learner_run import LEARNERS, EndingSource, train_from
from test_training import states_equal

from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.actors.contract import Agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.storages.transition import Transitions
from torchbeast.reporting.log_files import read_logs
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run import replay as run_replay
from torchbeast.run.assemble import LearnerConfig

TOY = f"{Toy.__module__}:{Toy.__name__}"
COLLECTED, SAMPLED = 2, 6  # steps of a batch


class Replay(EndingSource):
    """Gives samples of a replay."""


@pytest.fixture(autouse=True)
def samples_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source of a run stands for its replay."""

    def as_it_is(_: LearnerConfig, source: Replay, *others: Any) -> tuple[Replay, None]:
        return source, None

    monkeypatch.setattr(run_replay, "with_replay", as_it_is)


def batch(number: int) -> Transitions:
    """The same for a number, whoever asks."""
    generator = torch.Generator().manual_seed(number)

    def random(leaf: torch.Tensor) -> torch.Tensor:
        return torch.randn(SAMPLED, generator=generator).to(leaf.dtype)

    return two_transitions(COLLECTED).map(random)


def toy_agent(spec: ActorSpec) -> Agent:
    return Agent(LinearActor(), spec)


def train(savedir: Path, numbers: range, *words: str) -> dict[str, Any]:
    """A run, or its next part, that learns from the batches of these numbers; its checkpoint."""
    args = ["--savedir", str(savedir), "--xpid", "run", *words]
    flags = parse(MonoBeastFlags, "monobeast", args)
    train_from(lambda: Replay([batch(n) for n in numbers]), flags, make=toy_agent)
    return checkpoints.load(savedir / "run" / "model.tar")


REPLAY = ("--replay_size", "1000")
NEW = (*REPLAY, "--algo", TOY, "--momentum", "0.9", "--total_steps", "100", "--seed", "3")
LEARNT = (
    *("model_state_dict", "algorithm_state_dict", "optimizer_state_dict"),
    *("scheduler_state_dict", "stats", "rng"),
)


def test_a_run_that_goes_on_from_its_checkpoint_is_the_run_that_was_not_interrupted(
    tmp_path: Path,
) -> None:
    """Weights of all models, states of both optimisers, counters and log, bit for bit."""
    whole = train(tmp_path / "whole", range(5), *NEW)
    half = train(tmp_path / "parts", range(2), *NEW)
    both = train(tmp_path / "parts", range(2, 5))
    for key in LEARNT:
        assert states_equal(both[key], whole[key]), key
        assert key in ("optimizer_state_dict", "rng") or not states_equal(half[key], both[key])
    assert set(whole["algorithm_state_dict"]["models"]) == {"critic", "target"}
    assert set(whole["algorithm_state_dict"]["optimisers"]) == {"actor", "critic"}
    assert whole["scheduler_state_dict"] == {
        "steps": 5 * COLLECTED,
        "learnt_steps": 5 * SAMPLED,
        "optimiser_steps": 5,
        "schedule_starts": {},
        "version": 5,
    }
    rows = [metrics(tmp_path / name / "run") for name in ("whole", "parts")]
    assert rows[0] == rows[1] and len(rows[0]) == 5
    assert [row["step"] for row in rows[0]] == [2, 4, 6, 8, 10]
    rates = [row["actor_learning_rate"] / ACTOR_RATE for row in rows[0]]
    assert rates == pytest.approx([1.0, 0.98, 0.96, 0.94, 0.92])


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The log but for what depends on the clock and on the process."""
    return [
        {
            name: value
            for name, value in row.items()
            if not name.startswith(("_", "time_", "update_seconds", "steps_per_second"))
        }
        for row in read_logs(folder)
    ]


def test_the_weights_that_act_are_those_that_were_learnt(tmp_path: Path) -> None:
    saved = train(tmp_path, range(3), *NEW)
    learner, replica = LEARNERS[-1], LinearActor()
    assert learner.mode == "explore" and learner.weights.refresh(replica, None) == 3
    assert torch.equal(replica.w, saved["model_state_dict"]["w"])
    assert not torch.equal(replica.w, LinearActor().w)
