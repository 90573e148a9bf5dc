# SPDX-License-Identifier: Apache-2.0
"""Settings of the environment of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchbeast.envs.options import EnvOptions
from torchbeast.envs.spec import EnvSpec

DEFAULT_ENV = "PongNoFrameskip-v4"


@dataclass(frozen=True, kw_only=True)
class _EnvName:
    """The name of the environment, a class of its own so that it comes before the options."""

    env: str | None = None
    """An Atari name, Mock, Catch, any Gymnasium id, or package.module:factory for your own.
    Default: PongNoFrameskip-v4; with --mode test that of the run. An evaluation in another
    environment needs the same observations and actions."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's constructor as JSON, such as '{"size": 8}'. Default:
    none; with --mode test those of the run. Those of a package.module:factory are used again only
    when --env names it."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig(EnvOptions, _EnvName):
    """The environment."""

    @property
    def env_id(self) -> str:
        """The environment to train on."""
        return DEFAULT_ENV if self.env is None else self.env

    @property
    def spec(self) -> EnvSpec:
        """The environment to train on, with its arguments and options."""
        return EnvSpec(self.env_id, self.env_kwargs, options=self._options)

    @property
    def asked(self) -> EnvSpec:
        """Spec of the environment to evaluate in; its name is empty for that of the run."""
        return EnvSpec(self.env or "", self.env_kwargs, options=self._options)

    @property
    def _options(self) -> EnvOptions:
        return EnvOptions.of(dataclasses.asdict(self))
