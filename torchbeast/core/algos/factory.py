# SPDX-License-Identifier: Apache-2.0
"""An algorithm with its settings, and their names as hyperparameters.

The hyperparameters of an algorithm are the fields of its Config, with those of nested Configs, and
of StepConfig: the names of its flags, and for some of them the names that PPO's implementations
have given them for long.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchbeast.core.algos.config import OTHER_NAMES, StepConfig
from torchbeast.core.factories import refuse_other_types, refuse_unknown
from torchbeast.core.wording import as_arguments

if TYPE_CHECKING:
    from torchbeast.core.actors.contract import Actor
    from torchbeast.core.algos.base import Algorithm

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AlgoFactory:
    """Makes an algorithm for an actor; see Algorithm.create_factory."""

    algo: type[Algorithm[Any]]
    config: Any  # of type algo.Config
    step: StepConfig
    given: frozenset[str]  # names of the hyperparameters that are not defaults

    def __call__(self, device: torch.device | str, actor: Actor) -> Algorithm[Any]:
        """Makes the algorithm, with the actor moved to the device."""
        return self.algo(actor.to(device), self.config)

    def replaced(self, **hyperparameters: Any) -> AlgoFactory:
        """Returns this factory with other values of these hyperparameters."""
        names = _paths(self.config)
        config = self.config
        for name, value in hyperparameters.items():
            config = _replaced(config, names[name], value)
        return dataclasses.replace(self, config=config, given=self.given | {*hyperparameters})


def algo_factory(algo: type[Algorithm[Any]], hyperparameters: Mapping[str, Any]) -> AlgoFactory:
    """Returns the factory of an algorithm with these hyperparameters; see create_factory."""
    of_step = {field.name: (field.name,) for field in dataclasses.fields(StepConfig)}
    of_algo = _paths(algo.Config())
    known = {**of_algo, **of_step}
    others = {other: name for other, name in OTHER_NAMES.items() if name in known}
    refuse_unknown(f"{algo.__name__}.create_factory", hyperparameters, [*others, *known])
    types = {name: _type(algo.Config(), path) for name, path in of_algo.items()}
    types |= {field.name: field.type for field in dataclasses.fields(StepConfig)}
    refuse_other_types(
        hyperparameters, types | {other: types[name] for other, name in others.items()}
    )
    named = _by_flag(algo.__name__, hyperparameters, others)
    with as_arguments({others.get(name, name): name for name in hyperparameters}, fields=True):
        step = StepConfig(**{name: value for name, value in named.items() if name in of_step})
        made = AlgoFactory(algo=algo, config=algo.Config(), step=step, given=frozenset(named))
        return made.replaced(**{name: value for name, value in named.items() if name in of_algo})


def _by_flag(
    owner: str, hyperparameters: Mapping[str, Any], others: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the hyperparameters by the names of flags; raises TypeError for one given twice."""
    named: dict[str, Any] = {}
    for name, value in hyperparameters.items():
        flag = others.get(name, name)
        if flag in named:
            both = [given for given in hyperparameters if others.get(given, given) == flag]
            raise TypeError(f"{owner}.create_factory: {' and '.join(both)} are the same, give one")
        named[flag] = value
    return named


def recorded(config: Any) -> dict[str, Any]:
    """Returns the values of a Config by the names of flags, as the programs record them."""
    return {name: _value(config, path) for name, path in _paths(config).items()}


def _paths(config: Any) -> dict[str, Path]:
    """Returns the place of every setting by the name of its flag.

    The flags of a nested Config that shares a name with another begin with its field's name, as on
    the command line.
    """
    found = list(_settings(config))
    counts = Counter(path[-1] for path in found)
    shared = {path[0] for path in found if len(path) > 1 and counts[path[-1]] > 1}
    return {"_".join(path) if path[0] in shared else path[-1]: path for path in found}


def _settings(config: Any) -> Iterator[Path]:
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from ((field.name, *path) for path in _settings(value))
        else:
            yield (field.name,)


def _value(config: Any, path: Path) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def _type(config: Any, path: Path) -> Any:
    """Returns the annotation of the setting in this place."""
    owner = _value(config, path[:-1])
    return next(field.type for field in dataclasses.fields(owner) if field.name == path[-1])


def _replaced(config: Any, path: Path, value: Any) -> Any:
    """Returns the Config with another value in this place; its checks run."""
    name, *rest = path
    if rest:
        value = _replaced(getattr(config, name), tuple(rest), value)
    return dataclasses.replace(config, **{name: value})
