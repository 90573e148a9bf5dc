# SPDX-License-Identifier: Apache-2.0
"""Algorithms by name: the built-in ones, or a user's "my_module:MyAlgo"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchbeast.core.algos.config import OffPolicyConfig
from torchbeast.core.base import specs
from torchbeast.core.base.checks import did_you_mean, in_any_case

if TYPE_CHECKING:
    from torchbeast.core.algos.base import Algorithm

DEFAULT = "impala"
FOR_REPLAY = "laser"  # what a run learns with that has a replay and names no other
ALGOS = {
    DEFAULT: "torchbeast.core.algos.impala:IMPALA",
    FOR_REPLAY: "torchbeast.core.algos.laser:LASER",
    "ppo": "torchbeast.core.algos.ppo:PPO",
    "pqn": "torchbeast.core.algos.pqn:PQN",
    "dqn": "torchbeast.core.algos.dqn:DQN",
    "sac": "torchbeast.core.algos.sac:SAC",
    "r2d2": "torchbeast.core.algos.r2d2:R2D2",
    "td3": "torchbeast.core.algos.td3:TD3",
}
_CONFIGS = "torchbeast.core.algos.config"  # the Configs of ALGOS, whose modules import torch


def spelt(name: str) -> str:
    """Returns the name of an algorithm, which may be typed in any case."""
    return in_any_case(name, ALGOS)


def name_of(algo: type) -> str:
    """Returns the name by which --algo finds an algorithm."""
    path = f"{algo.__module__}:{algo.__qualname__}"
    return next((name for name, known in ALGOS.items() if known == path), path)


def learns_from_transitions(name: str) -> bool:
    """Returns whether the algorithm of that name learns from single steps of a replay; errors as of
    `find`. Built-in algorithms are not imported for it.
    """
    if name in ALGOS:
        return issubclass(config_of(name), OffPolicyConfig)
    from torchbeast.core.storages.transition import Transitions

    return issubclass(find_algorithm(name).takes, Transitions)


def find_algorithm(name: str) -> type[Algorithm[Any]]:
    """Returns the algorithm of that name.

    Raises SpecError when it does not exist, and when it is something else. Exceptions of its module
    are passed on as they are.
    """
    from torchbeast.core.algos.base import Algorithm

    if name not in ALGOS and ":" not in name:
        known, hint = ", ".join(ALGOS), did_you_mean(name, ALGOS)
        raise specs.SpecError(
            f"there is no algorithm {name!r}: use {known}, or my_module:MyAlgo{hint}"
        )
    algo: Any = specs.find_callable(ALGOS.get(name, name))
    if not (isinstance(algo, type) and issubclass(algo, Algorithm)):
        base = f"{Algorithm.__module__}.{Algorithm.__qualname__}"
        raise specs.SpecError(f"{name} is not an algorithm: it must be a subclass of {base}")
    return algo


def config_of(name: str) -> type:
    """Returns the Config of the algorithm of that name; errors as of `find_algorithm`.

    Configs of built-in algorithms import no torch.
    """
    if name not in ALGOS:
        return find_algorithm(name).Config
    config: Any = specs.find_callable(f"{_CONFIGS}:{ALGOS[name].partition(':')[2]}Config")
    return config
