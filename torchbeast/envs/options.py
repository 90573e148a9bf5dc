# SPDX-License-Identifier: Apache-2.0
"""Options of environments, the same in every process of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchbeast.core.checks import at_least, require
from torchbeast.core.envs.info import check_keywords

# The others are options of Atari games.
_OF_ANY = ("observation_keys", "mask_actions", "info_keywords")


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """Options of `envs.make` that must be the same in every process of a run.

    They go to other processes as `as_json()`, and into checkpoints as the flags of these names.
    """

    observation_keys: tuple[str, ...] = ()
    """Leaves of a dict observation that the network sees, such as --observation_keys blstats
    inventory/glyphs; the others are dropped where the environment runs. Default: all; with
    --mode test those of the run."""
    sticky_actions: float | None = None
    """Atari: probability, at each emulated frame, of repeating the previous action. Default: that
    of the id, 0.25 for ALE/Pong-v5 and Pong-v0, 0 for PongNoFrameskip-v4; with --mode test that
    of the run."""
    frame_skip: int | None = None
    """Atari: emulated frames per action. Default: 4; with --mode test that of the run."""
    full_action_space: bool = False
    """Atari: offer all 18 actions of the console instead of only those that the game uses."""
    mask_actions: bool = False
    """Never take an action that the environment's info["action_mask"] rules out (Taxi gives
    one): the mask joins the observation. Masks that are in the observation are obeyed anyway."""
    info_keywords: tuple[str, ...] = ()
    """Numbers that the environment gives in the info of a game's last step, such as
    --info_keywords is_success x_position. Their means over the games of an update are logged as
    info_is_success, info_x_position."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation_keys", tuple(self.observation_keys))
        check_keywords(self.info_keywords)
        object.__setattr__(self, "info_keywords", tuple(self.info_keywords))
        at_least(1, frame_skip=self.frame_skip)
        require(
            self.sticky_actions is None or 0 <= self.sticky_actions < 1,
            f"sticky_actions must be at least 0 and below 1, got {self.sticky_actions}",
        )
        keys = self.observation_keys
        require(
            not self.mask_actions or not keys or "action_mask" in keys,
            f"mask_actions needs action_mask among the observation_keys, got {' '.join(keys)}",
        )

    @staticmethod
    def of(values: Mapping[str, Any]) -> EnvOptions:
        """Returns the options among these values; missing ones have their defaults."""
        names = {field.name for field in dataclasses.fields(EnvOptions)}
        return EnvOptions(**{name: value for name, value in values.items() if name in names})

    def or_else(self, others: EnvOptions) -> EnvOptions:
        """Returns these options, with the others' in place of defaults."""
        return dataclasses.replace(others, **self._chosen())

    def of_atari(self) -> list[str]:
        """Returns the names of options that are set and apply to Atari games only."""
        return [name for name in self._chosen() if name not in _OF_ANY]

    def _chosen(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def as_json(self) -> dict[str, Any]:
        """Returns plain values, from which `of` restores the options."""
        return dataclasses.asdict(self)


DEFAULTS = EnvOptions()
