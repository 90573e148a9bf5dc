# SPDX-License-Identifier: Apache-2.0
"""How the environments of a name are made: what the flags say of it, for every process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class EnvOptions:
    """Options of `envs.make` that must be the same wherever a run makes its environments.

    They go to other processes as `as_json()`, and into checkpoints as the flags of these names.
    """

    observation_keys: tuple[str, ...] = ()  # leaves of a dict observation that count; (): all
    # Of Atari games only, see atari.py:
    sticky_actions: float | None = None  # None: what the id promises
    frame_skip: int | None = None  # None: four
    full_action_space: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation_keys", tuple(self.observation_keys))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EnvOptions:
        """The options among these values; what is missing has its default."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def or_else(self, others: EnvOptions) -> EnvOptions:
        """These options, and the others' where these have their defaults."""
        return dataclasses.replace(others, **self._chosen())

    def of_atari(self) -> list[str]:
        """The names of those that were chosen and only Atari games have."""
        return [name for name in self._chosen() if name != "observation_keys"]

    def _chosen(self) -> dict[str, Any]:
        """Those that have not their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    def as_json(self) -> dict[str, Any]:
        """Plain values, from which `of` makes the same again."""
        return dataclasses.asdict(self)


DEFAULTS = EnvOptions()
