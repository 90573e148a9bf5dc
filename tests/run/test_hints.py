# SPDX-License-Identifier: Apache-2.0
"""A run that starts without a preset names the tuned settings of its task."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from test_learner_run import train_with

from torchbeast.cli.learner_flags import DefaultsFlags, MonoBeastFlags
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.config import UNKNOWN, hint_of_settings


def test_tuned_settings_of_the_task_are_named_before_the_general_advice() -> None:
    hint = hint_of_settings("CartPole-v1", "ppo", False)
    assert hint == "Tip: tuned settings for CartPole-v1 with ppo: --preset cartpole-ppo"
    both = hint_of_settings("CartPole-v1", "impala", True)
    assert "--preset cartpole-impala or cartpole-impala-lstm" in both


def test_the_general_advice_is_for_the_defaults_outside_atari() -> None:
    assert hint_of_settings("Taxi-v3", "impala", True).startswith("These are the default settings")
    assert hint_of_settings("Taxi-v3", "impala", False) == ""
    assert hint_of_settings("SkiingNoFrameskip-v4", "impala", True) == ""
    assert hint_of_settings(UNKNOWN, "impala", True) == ""


@pytest.mark.parametrize("preset", [None, "catch"])
def test_only_a_run_without_a_preset_prints_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str | None
) -> None:
    flags = MonoBeastFlags(run=RunConfig(savedir=str(tmp_path), xpid="run"))
    flags = dataclasses.replace(flags, defaults=DefaultsFlags(preset=preset))
    train_with(flags, "Catch", 1.0)
    hint = "Tip: tuned settings for Catch with impala: --preset catch-impala"
    assert (hint in capsys.readouterr().out) == (preset is None)
