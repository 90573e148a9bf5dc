# SPDX-License-Identifier: Apache-2.0
"""Suites: sets of tasks on which algorithms are compared, with settings for each algorithm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchbeast.core.base.checks import did_you_mean
from torchbeast.errors import UsageError, expanded, refusing_paths


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The tasks of a suite.

    Args:
        presets: Names of presets by the name of an algorithm: one preset for all environments, or
            a preset for each task.
        envs: The environments, if the presets are not tasks themselves.
    """

    presets: Mapping[str, tuple[str, ...]]
    envs: tuple[str, ...] = ()

    def words(self, algo: str, preset: str | None) -> list[str]:
        """Returns the words of a sweep's command line that choose tasks and settings.

        preset: in place of the suite's own. Raises UsageError if the suite lacks a preset for the
        algorithm.
        """
        presets = self.presets.get(algo, ()) if preset is None else (preset,)
        if not presets:
            raise UsageError(
                f"the suite lacks settings for {algo} and has some for {', '.join(self.presets)}: "
                "give --preset"
            )
        values = {"env": self.envs, "preset": presets if len(presets) > 1 else ()}
        varied = [f"{name}={','.join(each)}" for name, each in values.items() if each]
        return [*varied, *([f"--preset={presets[0]}"] if len(presets) == 1 else [])]


_MINATAR = ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders")
_ATARI_5 = ("BattleZone", "DoubleDunk", "NameThisGame", "Phoenix", "Qbert")

SUITES = {
    "minatar": Suite(
        presets={
            "impala": ("minatar-breakout",),
            "ppo": ("minatar-breakout-ppo",),
            "pqn": ("minatar-breakout-pqn",),
            "dqn": ("minatar-breakout-dqn",),
        },
        envs=tuple(f"MinAtar/{game}-v1" for game in _MINATAR),
    ),
    "classic": Suite(
        presets={
            "impala": ("cartpole", "pendulum"),
            "ppo": ("cartpole-ppo",),
            "dqn": ("cartpole-dqn",),
            "sac": ("pendulum-sac",),
        }
    ),
    # Scores on these games predict the scores on all 57 (Aitchison et al. 2022).
    "atari-5": Suite(
        presets={"impala": ("atari-paper",)},
        envs=tuple(f"{game}NoFrameskip-v4" for game in _ATARI_5),
    ),
    "mujoco-3": Suite(
        presets={"sac": ("halfcheetah-sac",)}, envs=("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
    ),
}


def suite(name: str) -> Suite:
    """Returns the suite of a name, or of a JSON file with `presets` and `envs`."""
    if name in SUITES:
        return SUITES[name]
    if not name.endswith(".json"):
        known = ", ".join(SUITES)
        raise UsageError(
            f"no suite {name!r}: use {known}, or a .json file{did_you_mean(name, SUITES)}"
        )
    try:
        with refusing_paths("give a file that can be read"):
            read = json.loads(Path(expanded(name)).read_text(encoding="utf-8"))
        presets = {algo: tuple(each) for algo, each in read["presets"].items()}
        return Suite(presets=presets, envs=tuple(read.get("envs", ())))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(
            f'{name} must hold {{"envs": ["A", "B"], "presets": {{"ppo": ["cartpole-ppo"]}}}}'
        ) from None
