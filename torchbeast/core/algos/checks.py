# SPDX-License-Identifier: Apache-2.0
"""Checks of algorithms: their declarations, and the results of `losses`.

Wrong ones would not fail by themselves: a term of shape [T, B] would be summed, a misspelt
reduction taken for "sum".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, get_args

from torch import Tensor

from torchbeast.core.actors.contract import Actor, Mode
from torchbeast.core.algos.base import Algorithm, Losses
from torchbeast.core.checks import one_of, require
from torchbeast.core.losses import Mean, Reduction
from torchbeast.errors import UsageError

AlgorithmT = TypeVar("AlgorithmT", bound=Algorithm[Any])
Metrics = Mapping[str, Tensor | Mean]


def check_class(algorithm: type[Algorithm[Any]]) -> None:
    """Raises ValueError unless the class declares what `Algorithm` describes."""
    name = algorithm.__name__
    one_of(get_args(Reduction), **{f"{name}.reduction": algorithm.reduction})
    one_of(get_args(Mode), **{f"{name}.mode": algorithm.mode})
    require(
        _are_names(algorithm.needs),
        f'{name}.needs must be a tuple of names such as ("policy_logits",), '
        f"got {algorithm.needs!r}",
    )
    require(
        isinstance(algorithm.minimised_by, Mapping),
        f"{name}.minimised_by must map terms to names of optimisers, "
        f"got {algorithm.minimised_by!r}",
    )
    _check_is_class(f"{name}.takes", algorithm.takes, object)
    _check_is_class(f"{name}.actor_type", algorithm.actor_type, Actor)
    _check_config(name, getattr(algorithm, "Config", None))


def _are_names(needs: Any) -> bool:
    is_collection = isinstance(needs, Collection) and not isinstance(needs, str)
    return is_collection and all(isinstance(extra, str) for extra in needs)


def _check_is_class(name: str, found: Any, base: type) -> None:
    kind = "a class" if base is object else f"a subclass of {base.__name__}"
    fits = isinstance(found, type) and issubclass(found, base)
    require(fits, f"{name} must be {kind}, got {found!r}")


def _check_config(name: str, config: Any) -> None:
    """Raises ValueError unless Config is a frozen dataclass with a default for every field."""
    is_frozen = isinstance(config, type) and dataclasses.is_dataclass(config)
    is_frozen = is_frozen and config.__dataclass_params__.frozen
    require(
        is_frozen,
        f"{name}.Config must be a dataclass with @dataclass(frozen=True, kw_only=True), "
        f"got {config!r}: a subclass of another algorithm's Config will do",
    )
    for field in dataclasses.fields(config):
        no_default = field.default is field.default_factory is dataclasses.MISSING
        require(
            not (field.init and no_default),
            f"{config.__name__}.{field.name} has no default: every field needs one, because "
            f"it is a flag",
        )


def checked(algo: AlgorithmT) -> AlgorithmT:
    """Returns the algorithm; raises UsageError if Algorithm.__init__ has not run for it."""
    for attribute in ("actor", "models", "optimisers"):
        if not hasattr(algo, attribute):
            raise UsageError(
                f"{type(algo).__name__} has no `{attribute}`: its __init__ must call "
                "super().__init__(actor, config) first"
            )
    return algo


def checked_losses(algo: Algorithm[Any], found: Losses) -> Losses:
    """Returns the result of `losses`.

    Raises ValueError unless its terms are scalars that weights can change, and its metrics scalars.
    """
    name = f"{type(algo).__name__}.losses"
    require(
        isinstance(found, Losses),
        f"{name} must return Losses(terms, metrics), got {type(found).__name__}",
    )
    require(bool(found.terms), f"{name} must return at least one term to minimise, got none")
    for term, loss in found.terms.items():
        _check_scalar(f"{name}: the term {term}", loss, "sum it over the steps, or take the mean")
        require(
            loss.requires_grad or _has_frozen(algo),
            f"{name}: the term {term} must depend on a parameter, got a constant: compute it "
            "from the network's outputs without detach() and no_grad(), or return it as a metric",
        )
    _check_metrics(name, found.metrics)
    return found


def _has_frozen(algo: Algorithm[Any]) -> bool:
    """Returns whether a parameter of the optimisers is frozen: a term may depend on it alone."""
    groups = [group for optimiser in algo.optimisers.values() for group in optimiser.param_groups]
    return not all(parameter.requires_grad for group in groups for parameter in group["params"])


def checked_metrics(algo: Algorithm[Any], found: Metrics) -> Metrics:
    """Returns the result of `metrics`; raises ValueError unless all are scalars."""
    _check_metrics(f"{type(algo).__name__}.metrics", found)
    return found


def _check_metrics(name: str, metrics: Metrics) -> None:
    for metric, figure in metrics.items():
        for part in figure if isinstance(figure, Mean) else (figure,):
            _check_scalar(f"{name}: the metric {metric}", part, "take losses.mean(values, mask)")


def _check_scalar(name: str, found: Any, how: str) -> None:
    """Raises ValueError unless it is a scalar; how: makes it one."""
    if not isinstance(found, Tensor):
        raise ValueError(f"{name} must be a scalar tensor, got {type(found).__name__}")
    if found.dim():
        raise ValueError(f"{name} must be a scalar, got shape {list(found.shape)}: {how}")
