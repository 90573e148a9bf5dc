# SPDX-License-Identifier: Apache-2.0
"""The flags of algorithms that learn from single steps: defaults, and combinations refused."""

from __future__ import annotations

from typing import Any

import pytest

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.config import ReplayConfig
from torchbeast.errors import UsageError


def parsed(*words: str) -> Any:
    return parse(MonoBeastFlags, "monobeast", ["--xpid", "x", *words])


def test_an_algorithm_changes_the_defaults_of_the_replay() -> None:
    flags = flatten(parsed("--algo", "dqn"))
    assert (flags["replay_size"], flags["replay_ratio"], flags["batch_size"]) == (100_000, 8.0, 32)
    assert flatten(parsed("--algo", "sac", "--batch_size", "64"))["batch_size"] == 64
    assert flatten(parsed("--algo", "impala"))["replay_size"] == 0
    preset = flatten(parsed("--preset", "pendulum-sac"))
    assert (preset["learn_start"], preset["replay_size"]) == (1_000, 1_000_000)


@pytest.mark.parametrize("algo", ["ppo", "dqn", "sac", "td3"])
def test_an_algorithm_without_v_trace_has_few_environments_unless_servers_decide(algo: str) -> None:
    assert flatten(parsed("--algo", algo))["num_envs"] == 8
    learner = parse(PolyBeastLearnerFlags, "polybeast_learner", ["--xpid", "x", "--algo", algo])
    assert learner.fleet.num_envs is None


def test_a_batch_of_ppo_follows_the_number_of_environments_however_it_is_typed() -> None:
    for typed in ("1e2", "100", "1_00"):
        assert flatten(parsed("--algo", "ppo", "--num_envs", typed))["batch_size"] == 100


def test_the_source_collects_one_rollout_at_a_time() -> None:
    config = parsed("--algo", "sac", "--unroll_length", "7").learner_config("Pendulum-v1")
    assert config.learns_from_transitions and config.spare_columns == 0
    assert (config.online_batch_size, config.rollouts.unroll_length) == (1, 7)
    assert config.rollouts.batch_size == 256


def test_with_a_fixed_lag_of_0_all_environments_collect_between_updates() -> None:
    flags = parsed("--algo", "dqn", "--fixed_lag", "0", "--num_envs", "6")
    config = flags.learner_config("Catch")
    assert config.synchronous_rollouts == config.online_batch_size == 6


def test_updates_a_step_are_the_ratio_over_the_batch() -> None:
    replay = ReplayConfig(replay_size=1000, replay_ratio=8.0)
    assert replay.updates_per_step(32, 4, 100) == 0.25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algo", "dqn", "--replay_size", "0"], "--replay_size is 0, but --replay_ratio needs"),
        (["--algo", "dqn", "--replay_ratio", "0"], "trains on replayed steps only"),
        (["--algo", "sac", "--replay_service", "/x"], "agents of laser, not steps"),
        (["--algo", "sac", "--replay_size", "7"], "too small for 2 rollouts of --unroll_length 4"),
        (["--algo", "dqn", "--total_steps", "1000"], "use at most 999"),
        (["--algo", "dqn", "--replay_size", "902"], "use at most 900"),
        (["--algo", "dqn", "--fixed_lag", "1"], "with --algo dqn their number per .*--fixed_lag 0"),
        (
            ["--algo", "dqn", "--fixed_lag", "0", "--replay_ratio", "inf"],
            "--replay_ratio inf, .* never wait .* --fixed_lag 0 makes them wait",
        ),
        (
            ["--algo", "dqn", "--fixed_lag", "0", "--num_envs", "3", "--num_workers", "2"],
            "--num_envs 3 must be a multiple of --num_workers 2.*, or set --fixed_lag None",
        ),
        (
            ["--algo", "dqn", "--max_lag", "3"],
            "--max_lag limits .* --algo dqn trains on replayed steps",
        ),
        (["--n_step", "3"], "--n_step 3 does not work with this algorithm"),
        (
            ["--algo", "laser", "--priority_exponent", "0.6"],
            "--priority_exponent 0.6 does not work with",
        ),
        (
            ["--algo", "r2d2", "--n_step", "1", "--hindsight_share", "0.5"],
            "--hindsight_share 0.5 does not work with",
        ),
        (["--algo", "dqn", "--replay_kl_threshold", "1"], "replay_kl_threshold"),
        (["--algo", "dqn", "--n_step", "3", "--hindsight_share", "0.8"], "but --n_step is 3"),
        (["--algo", "td3", "--hindsight_share", "1.5"], "--hindsight_share must be between"),
    ],
)
def test_what_cannot_be_is_a_sentence(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parsed(*words)


def test_an_evaluation_has_no_replay_to_check() -> None:
    assert flatten(parsed("--mode", "test", "--algo", "dqn"))["replay_size"] == 0


def test_the_queue_of_servers_holds_rollouts_not_steps() -> None:
    words = ["--xpid", "x", "--algo", "sac", "--max_learner_queue_size", "2"]
    parse(PolyBeastFlags, "polybeast", words)
