# SPDX-License-Identifier: Apache-2.0
"""Settings of the environment of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torchbeast.envs.options import EnvOptions
from torchbeast.envs.spec import EnvSpec

DEFAULT_ENV = "PongNoFrameskip-v4"


@dataclass(frozen=True, kw_only=True)
class _EnvName:
    """The name comes before the options of what it names."""

    env: str | None = None
    """An Atari name, Mock, Catch, any Gymnasium id, or package.module:factory for your own.
    Default: PongNoFrameskip-v4; with --mode test that of the run. --mode test in another one needs
    the same observations and actions."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig(EnvOptions, _EnvName):
    """What is played."""

    @property
    def env_id(self) -> str:
        """What is trained on."""
        return DEFAULT_ENV if self.env is None else self.env

    @property
    def spec(self) -> EnvSpec:
        """What is trained on, and how it is made."""
        return EnvSpec(self.env_id, options=self._options)

    @property
    def asked(self) -> EnvSpec:
        """What --mode test is told; the name is empty where that of the run is meant."""
        return EnvSpec(self.env or "", options=self._options)

    @property
    def _options(self) -> EnvOptions:
        return EnvOptions.of(dataclasses.asdict(self))
