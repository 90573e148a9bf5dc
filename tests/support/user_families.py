# SPDX-License-Identifier: Apache-2.0
"""Families of environments that users bring, and the package that each needs."""

from __future__ import annotations

from typing import NamedTuple

import gymnasium
import pytest


class Family(NamedTuple):
    """An environment that represents others of its kind."""

    name: str  # of Gymnasium's, without the version
    package: str = "gymnasium"
    observation_keys: tuple[str, ...] = ()
    version: int | None = None  # None: the newest that is registered

    def env_id(self) -> str:
        """Returns the id that users give; skips the test if its package is not installed."""
        pytest.importorskip(self.package, reason=f"{self.name} needs {self.package}")
        separator = "_v" if self.package == "pettingzoo" else "-v"
        version = self._newest() if self.version is None else self.version
        return f"{self.name}{separator}{version}"

    def _newest(self) -> int:
        specs = gymnasium.registry.values()  # with others' of the same name, as ALE/Blackjack-v5
        known = [spec for spec in specs if (spec.namespace, spec.name) == (None, self.name)]
        return max(spec.version or 0 for spec in known)


FAMILIES = [
    Family("FrozenLake"),
    Family("Taxi"),
    Family("Blackjack"),
    Family("CliffWalking"),
    Family("CartPole"),
    Family("Acrobot"),
    Family("MountainCar"),
    Family("MountainCarContinuous"),
    Family("Pendulum"),
    Family("InvertedPendulum", "mujoco"),
    Family("HalfCheetah", "mujoco"),
    Family("MiniGrid-Empty-5x5", "minigrid", ("image", "direction"), 0),
    Family("NetHackScore", "nle", version=0),
    Family("NetHackScore", "nle", ("blstats", "glyphs"), 0),
    Family("MinAtar/Breakout", "minatar", version=1),
    Family("PongNoFrameskip", "ale_py", version=4),
    Family("pettingzoo:classic/connect_four", "pettingzoo", version=3),
]


def name_of(family: Family) -> str:
    """Returns the name of the test case."""
    return "-".join([family.name.replace("/", "-").replace(":", "-"), *family.observation_keys])
