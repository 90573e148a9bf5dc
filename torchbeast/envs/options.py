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

    def __post_init__(self) -> None:
        object.__setattr__(self, "observation_keys", tuple(self.observation_keys))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> EnvOptions:
        """The options among these values; what is missing has its default."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in names})

    def as_json(self) -> dict[str, Any]:
        """Plain values, from which `of` makes the same again."""
        return dataclasses.asdict(self)


DEFAULTS = EnvOptions()
