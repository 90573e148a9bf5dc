# SPDX-License-Identifier: Apache-2.0
"""`--reward_clipping auto` is resolved by the environment before anything is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_learner_run import train_with

from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.algos.config import IMPALAConfig
from torchbeast.errors import UsageError
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.config import UNKNOWN, resolved
from torchbeast.zoo import PRESETS


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("PongNoFrameskip-v4", "abs_one"),
        ("ALE/Breakout-v5", "abs_one"),
        ("Taxi-v3", "none"),
        ("CartPole-v1", "none"),
        ("MinAtar/Breakout-v1", "none"),
        ("Catch", "none"),
        ("my_package.my_module:make_env", "none"),
        (UNKNOWN, "abs_one"),  # the default of the original's learner
    ],
)
def test_auto_clips_rewards_of_atari_games_and_of_unknown_environments(
    env_id: str, expected: str
) -> None:
    assert resolved("auto", env_id) == expected


@pytest.mark.parametrize("given", ["abs_one", "none"])
@pytest.mark.parametrize("env_id", ["PongNoFrameskip-v4", "Taxi-v3"])
def test_a_clipping_that_is_given_is_not_changed(given: Any, env_id: str) -> None:
    assert resolved(given, env_id) == given


@pytest.mark.parametrize("env_id", ["Taxi-v3", "PongNoFrameskip-v4"])
def test_the_resolved_clipping_is_printed_and_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], env_id: str
) -> None:
    flags = MonoBeastFlags(run=RunConfig(savedir=str(tmp_path), xpid="run"))
    how = "abs_one" if env_id.startswith("Pong") else "none"
    train_with(flags, env_id, 1.0)
    said = "Rewards: unclipped" if how == "none" else "Rewards: clipped to [-1, 1]"
    assert said in capsys.readouterr().out
    meta = json.loads((tmp_path / "run" / "meta.json").read_text())
    saved = torch.load(tmp_path / "run" / "model.tar", weights_only=True)
    assert meta["args"]["reward_clipping"] == saved["flags"]["reward_clipping"] == how


def test_presets_with_rewards_above_one_name_their_clipping() -> None:
    """Rewards of the other presets are in [-1, 1] after --reward_scale: nothing is clipped."""
    named = {name for name, preset in PRESETS.items() if "reward_clipping" in preset.flags}
    assert {"pong-impala", "atari-impala", "pendulum-impala"} <= named


def test_normalised_returns_where_rewards_are_clipped_are_wrong_usage() -> None:
    flags = MonoBeastFlags(algorithm=IMPALAConfig(normalise_returns=True))
    assert flags.learner_config("CartPole-v1").algorithm.normalise_returns
    with pytest.raises(UsageError, match="reward_clipping abs_one clamps them"):
        flags.learner_config("PongNoFrameskip-v4")
