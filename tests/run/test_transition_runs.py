# SPDX-License-Identifier: Apache-2.0
"""Runs that learn from single steps: the replay's memory, its network, resuming, and hindsight."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.core.storages.replay.rollout_replay import ByPriority
from torchbeast.core.storages.replay.transition_replay import Sampling, TransitionReplay
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.envs import EnvSpec
from torchbeast.envs.env_process import outcome_of
from torchbeast.errors import UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.monobeast import main
from torchbeast.reporting.log_files import read_logs
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.assemble import LearnerConfig, assemble
from torchbeast.run.replay import by_priority, make_replay, mixed_source, transition_source

BUFFERS = 1_000_000


def config(*words: str) -> LearnerConfig:
    args = ["--xpid", "x", "--learn_start", "0", *words]
    return parse(MonoBeastFlags, "monobeast", args).learner_config("Catch")


def agent(spec: ActorSpec) -> Agent:
    return make_agent(spec, ArraySpec((2,), "float32", low=-1, high=1), Discrete(3), 1)


def replay_of(size: int, *words: str, free: int | None = None) -> TransitionReplay:
    settings = config("--algo", "dqn", "--replay_size", str(size), *words)
    outcome = functools.partial(outcome_of, EnvSpec("Catch"), Supervisor())
    rollouts = RolloutSpec(agent(ActorSpec("q-mlp")), (), settings.rollouts.unroll_length)
    made = settings, rollouts, 1, BUFFERS, free, outcome
    replay: TransitionReplay = make_replay(*made)
    return replay


def test_single_steps_are_sampled_as_the_flags_say() -> None:
    made = replay_of(1000, "--n_step", "3", "--priority_exponent", "0.6")
    expected = Sampling(n_step=3, priority_exponent=0.6, hindsight=None, hindsight_share=0.0)
    assert made._how == expected


def test_rollouts_are_drawn_by_priority_in_windows_that_cover_every_row() -> None:
    windows = ["--unroll_length", "40", "--burn_in", "30", "--priority_exponent", "0.7"]
    assert by_priority(config("--algo", "r2d2", *windows)) == ByPriority(0.7, 10)
    assert by_priority(config("--algo", "laser", "--replay_size", "1000")) is None


def test_r2d2_joins_as_many_steps_as_its_flag_says() -> None:
    made = assemble(config("--algo", "r2d2", "--n_step", "4"), agent, PublishedWeights)
    algo: Any = made.optimiser_step.algo
    assert algo.n_step == 4


def test_the_weights_of_a_resumed_run_continue_with_its_steps() -> None:
    words = ["--priority_exponent", "0.6", "--priority_beta", "0.7", "--total_steps", "1000"]
    settings = config("--algo", "dqn", "--replay_size", "2000", *words)
    how = transition_source(Mock(), replay_of(2000, *words), settings, 400)._schedule
    assert (how.first_step, how.beta, how.total_steps) == (400, 0.7, 1000)
    assert how.beta_at(0) == pytest.approx(0.7 + 0.3 * 0.4)


def test_rollouts_are_mixed_as_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchbeast.collect.replayed.MixedSource", lambda *_, **given: given)
    words = ["--replay_size", "2000", "--learn_start", "300", "--priority_beta", "0.7"]
    given: Any = mixed_source(Mock(), Mock(), config("--algo", "r2d2", *words), Mock(), 2)
    assert (given["learn_start"], given["beta"]) == (300, 0.7)


@pytest.mark.parametrize(("algo", "name"), [("dqn", "q-mlp"), ("sac", "sac-mlp")])
@pytest.mark.parametrize("model", ["auto", "mlp"])
def test_the_network_is_of_the_algorithms_family(algo: str, name: str, model: str) -> None:
    made = assemble(config("--algo", algo, "--model", model), agent, PublishedWeights)
    assert made.agent.spec.name == name


def test_wrong_combinations_are_sentences_at_the_start() -> None:
    def over_a_box(spec: ActorSpec) -> Agent:
        return make_agent(spec, ArraySpec((2,), "float32"), Box(-1.0, 1.0, (2,)), 1)

    for words, make, message in (
        (["--algo", "dqn"], over_a_box, "needs a Discrete action space"),
        (["--algo", "td3"], agent, "TD3Net needs a Box action space, got Discrete"),
        (["--algo", "sac", "--use_lstm"], agent, "have no recurrent state: remove use_lstm"),
    ):
        with pytest.raises(UsageError, match=message):
            assemble(config(*words), make, PublishedWeights)


def test_the_start_says_what_the_memory_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """8 bytes of observation; reward 4, three flags, counter 4, return 4, action 8, version 8;
    with priorities a tree of 2 * 1024 sums for 1000 steps.
    """
    each = 8 + 4 + 3 + 4 + 4 + 8 + 8
    replay_of(1000)
    assert f"Replay buffer: 1,000 steps of {each} bytes," in capsys.readouterr().out
    replay_of(1000, "--priority_exponent", "0.6")
    assert f"steps of {each + 17} bytes" in capsys.readouterr().out
    with pytest.raises(UsageError, match=f"replay_size 50000 needs .*{each} bytes a step"):
        replay_of(50_000, free=2_000_000)


def test_hindsight_without_goals_is_a_sentence() -> None:
    with pytest.raises(UsageError, match="observations with achieved_goal and desired_goal"):
        replay_of(1000, "--hindsight_share", "0.8", "--n_step", "1")


def run(folder: Path, *words: str) -> dict[str, Any]:
    args = ["--savedir", str(folder), "--xpid", "run", "--num_envs", "2", *ONE, *words]
    assert main(args) == 0
    return checkpoints.load(folder / "run" / "model.tar")


ONE = ("--num_workers", "1")  # each imports torch
SMALL = ("--torch_threads", "1", "--batch_size", "8", "--replay_size", "2000")


def test_a_run_resumes_with_its_replay_and_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = ["--algo", "dqn", "--env", "BitFlip", "--env_kwargs", '{"bits": 4}', *SMALL]
    more = [
        "--learn_start",
        "100",
        "--hindsight_share",
        "0.8",
        "--n_step",
        "1",
        "--checkpoint_replay",
    ]
    first = run(tmp_path, *new, *more, "--total_steps", "400")
    assert first["model"] == "q-mlp" and first["stats"]["step"] >= 400
    second = run(tmp_path, "--total_steps", "600")
    said = capsys.readouterr().out
    assert "Resuming" in said and "The replay continues with the 4" in said
    counters = second["scheduler_state_dict"]
    assert counters["steps"] >= 600
    assert counters["optimiser_steps"] == counters["version"]
    assert abs(counters["version"] - (counters["steps"] - 100)) <= 8, "8 / 8 updates a step"
    steps = [row["step"] for row in read_logs(tmp_path / "run")]
    assert steps == sorted(steps)
    assert not torch.equal(first["model_state_dict"]["epsilon"], torch.tensor(1.0))
    assert main(["--mode", "test", "--savedir", str(tmp_path), "--xpid", "run"]) == 0
    assert "Mean" in capsys.readouterr().out


def test_a_fixed_lag_of_0_makes_runs_reproducible(tmp_path: Path) -> None:
    """Random actions, samples by priority, and the weights that all of it led to."""
    words = ["--algo", "dqn", "--env", "Catch", *SMALL, "--learn_start", "50", "--seed", "3"]
    how = ["--n_step", "3", "--priority_exponent", "0.6", "--fixed_lag", "0"]
    how += ["--num_workers", "2"]
    first, again = (
        run(tmp_path / name, *words, *how, "--total_steps", "150")["model_state_dict"]
        for name in ("first", "again")
    )
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    for name in ("first", "again"):
        rows = list(read_logs(tmp_path / name / "run"))
        assert {row["max_lag"] for row in rows if "max_lag" in row} == {0}


@pytest.mark.long
def test_continuous_actions_are_learnt_by_priority(tmp_path: Path) -> None:
    words = ["--algo", "sac", "--env", "Pendulum-v1", *SMALL, "--learn_start", "50"]
    how = ["--n_step", "3", "--priority_exponent", "0.6", "--replay_ratio", "8"]
    saved = run(tmp_path, *words, *how, "--total_steps", "150")
    assert saved["scheduler_state_dict"]["optimiser_steps"] >= 90
    rows = list(read_logs(tmp_path / "run"))
    assert rows[-1]["samples_per_insert"] > 3 and "mean_lag" in rows[0]


def test_a_resumed_run_that_ends_before_its_replay_is_filled_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--algo", "dqn", "--replay_size", "2000", "--learn_start", "500"]
    settings = config(*words, "--total_steps", "1000")
    for first_step, is_said in (
        (400, False),
        (600, True),
        (0, False),
        (1000, False),
        (1003, False),
    ):
        transition_source(Mock(), replay_of(2000), settings, first_step)
        assert ("Only one update follows" in capsys.readouterr().out) == is_said
