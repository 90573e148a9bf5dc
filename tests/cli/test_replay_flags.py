# SPDX-License-Identifier: Apache-2.0
"""The flags of replay: which algorithm they select, and what does not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastFlags, PolyBeastLearnerFlags
from torchbeast.cli.learner_flags import LearnerFlags, MonoBeastFlags
from torchbeast.collect.config import ReplayConfig, RolloutConfig
from torchbeast.errors import UsageError
from torchbeast.run import checkpoint as checkpoints

LEARNERS: dict[str, type[LearnerFlags]] = {
    "monobeast": MonoBeastFlags,
    "polybeast": PolyBeastFlags,
    "polybeast_learner": PolyBeastLearnerFlags,
}
WRONG = [
    (["--replay_ratio", "3"], "--replay_ratio needs a replay: set --replay_size too."),
    (["--replay_ratio", "1"], "--replay_ratio needs a replay: set --replay_size too."),
    (["--algo", "impala", "--replay_ratio=1"], "--replay_ratio needs a replay: set"),
    (["--replay_kl_threshold", "1"], "--replay_kl_threshold needs a replay: set"),
    (["--learn_start", "9"], "--learn_start needs a replay: set --replay_size too."),
    (["--checkpoint_replay"], "--checkpoint_replay needs a replay: set --replay_size too."),
    (["--replay_size", "-1"], "--replay_size must be at least 0, got -1."),
    (["--replay_size", "900", "--replay_ratio", "nan"], "--replay_ratio must be at least 0, got"),
    (
        ["--replay_size", "639"],
        "--replay_size 639 is too small for 8 rollouts of --unroll_length 80: use at least 640.",
    ),
    (
        ["--replay_size", "100", "--batch_size", "1"],
        "--replay_size 100 is too small for 2 rollouts of --unroll_length 80: use at least 160.",
    ),
    (
        ["--replay_size", "9000", "--replay_ratio", "0.3"],
        "--replay_ratio 0.3 times --batch_size 8 is 2.4 rollouts: change them so that the product "
        "is a whole number.",
    ),
    (
        ["--replay_size", "1000", "--learn_start", "961"],
        "training never begins after --learn_start 961 steps, because --replay_size 1000 holds 960 "
        "steps: use at most 960.",
    ),
    (
        ["--replay_size", "9000", "--checkpoint_replay", "--disable_checkpoint"],
        "--checkpoint_replay saves the replay with every checkpoint; remove --disable_checkpoint.",
    ),
    (["--replay_service", "/s"], "--replay_service needs a replay: set --replay_size too."),
    (
        ["--replay_size", "9000", "--replay_service", "/s", "--checkpoint_replay"],
        "--checkpoint_replay saves the replay of one run, but --replay_service is shared by "
        "several runs: remove one of the two.",
    ),
]


def flags_of(program: str, *args: str) -> dict[str, Any]:
    return flatten(parse(LEARNERS[program], program, ["--xpid", "x", *args]))


@pytest.mark.parametrize("words", [["--replay_size", "9000"], ["--replay_size=9000"]])
def test_a_replay_selects_laser(words: list[str]) -> None:
    flags = flags_of("monobeast", *words, "--replay_kl_threshold", "0.3", "--learning_rate", "0.1")
    assert flags["algo"] == "laser" and flags["replay_kl_threshold"] == 0.3
    assert flags["learning_rate"] == 0.1, "the settings of IMPALA are LASER's too"
    assert flags["replay_size"] == 9000 and flags["replay_ratio"] == 1


def test_without_a_replay_the_algorithm_is_impala() -> None:
    assert flags_of("monobeast")["algo"] == flags_of("monobeast", "--preset", "pong")["algo"]
    assert flags_of("monobeast")["algo"] == "impala"


@pytest.mark.parametrize(
    "words",
    [["--replay_size", "0"], ["--replay_size=0"], ["--replay_ratio", "0"], ["--replay_ratio=0.0"]],
)
def test_a_zero_that_is_typed_selects_nothing(words: list[str]) -> None:
    assert flags_of("monobeast", *words)["algo"] == "impala"


def test_a_replay_may_wait_until_it_is_full() -> None:
    flags = flags_of("monobeast", "--replay_size", "1000", "--learn_start", "960")
    assert flags["learn_start"] == 960


def test_an_algorithm_that_is_named_is_kept() -> None:
    words = ["--replay_size", "9000", "--algo", "impala"]
    assert flags_of("monobeast", *words)["algo"] == "impala", "the run refuses it in a sentence"


def test_a_preset_of_impala_learns_from_a_replay_too() -> None:
    flags = flags_of("monobeast", "--preset", "catch", "--replay_size", "9000")
    assert flags["algo"] == "laser" and flags["env"] == "Catch"


def test_a_resumed_run_keeps_its_algorithm_and_replay(tmp_path: Path) -> None:
    savedir = ["--savedir", str(tmp_path)]
    (tmp_path / "a").mkdir()
    recorded = flags_of("monobeast", "--replay_size", "9000", "--replay_ratio", "7")
    checkpoints.save(tmp_path / "a" / "model.tar", {"flags": recorded})
    flags = flags_of("monobeast", *savedir, "--xpid", "a")
    assert (flags["algo"], flags["replay_size"], flags["replay_ratio"]) == ("laser", 9000, 7.0)
    checkpoints.save(tmp_path / "a" / "model.tar", {"flags": flags_of("monobeast")})
    flags = flags_of("monobeast", *savedir, "--xpid", "a", "--replay_size", "9000")
    assert flags["algo"] == "impala", "the run refuses it in a sentence"


@pytest.mark.parametrize(("words", "sentence"), WRONG)
def test_a_wrong_setting_is_a_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(UsageError) as error:
        flags_of("monobeast", *words)
    assert sentence in str(error.value), error.value


@pytest.mark.parametrize(
    ("ratio", "batch_size", "columns"),
    [(1, 8, 8), (0.5, 8, 4), (7, 8, 56), (0, 8, 0), (0.125, 8, 1), (0.29, 100, 29)],
)
def test_the_ratio_decides_the_number_of_replayed_rollouts(
    ratio: float, batch_size: int, columns: int
) -> None:
    config = ReplayConfig(replay_size=9000, replay_ratio=ratio)
    assert config.spare_columns(RolloutConfig(batch_size=batch_size)) == columns
    assert config.is_used == (columns > 0)


def test_without_a_size_nothing_is_replayed() -> None:
    for config in (ReplayConfig(), ReplayConfig(replay_ratio=0)):
        assert not config.is_used and config.spare_columns(RolloutConfig()) == 0
