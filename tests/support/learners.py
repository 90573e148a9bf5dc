# SPDX-License-Identifier: Apache-2.0
"""Makes the optimiser step of an algorithm from settings given by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.algos.config import OptimiserConfig, StepConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.envs.spaces import Discrete
from torchbeast.core.update.optimiser_step import OptimiserStep


def impala(actor: Any, kind: type[IMPALA] = IMPALA, **settings: Any) -> OptimiserStep[Any]:
    """Returns the optimiser step of IMPALA, or a subclass, with this actor.

    settings: fields of its Configs, and arguments of OptimiserStep. An actor without a distribution
    gets one of three actions.
    """
    return _step(actor, kind, settings)


def ppo(actor: Any, kind: type[PPO] = PPO, **settings: Any) -> OptimiserStep[Any]:
    """Returns the optimiser step of PPO, or a subclass, with this actor; settings as above."""
    return _step(actor, kind, settings)


def _step(actor: Any, kind: type[Any], settings: dict[str, Any]) -> OptimiserStep[Any]:
    if not hasattr(actor, "distribution"):
        actor.distribution = distribution_for(Discrete(3))
    settings = {"reward_clipping": "abs_one", "total_steps": 10_000} | settings
    optimiser, step = (_taken(settings, config) for config in (OptimiserConfig, StepConfig))
    config = kind.Config(**_taken(settings, kind.Config))
    optimiser = dataclasses.replace(config.optimiser, **optimiser)
    config = dataclasses.replace(config, optimiser=optimiser)
    return OptimiserStep(kind(actor, config), StepConfig(**step), **settings)


def _taken(settings: dict[str, Any], config: Any) -> dict[str, Any]:
    fields = (field for field in dataclasses.fields(config) if field.type != "OptimiserConfig")
    names = {field.name for field in fields}
    return {name: settings.pop(name) for name in names & set(settings)}
