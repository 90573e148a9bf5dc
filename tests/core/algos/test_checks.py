# SPDX-License-Identifier: Apache-2.0
"""Mistakes in an algorithm are sentences, instead of something else that is learnt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from learners import impala
from torch import Tensor

from torchbeast.core import losses
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.algos import registry
from torchbeast.core.algos.base import Algorithm, Losses, checked
from torchbeast.core.algos.config import IMPALAConfig
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.losses import Mean
from torchbeast.core.storages.rollout import Rollout

T, B = 5, 4
Make = Callable[..., Rollout]
RAW = torch.ones(T, B)


class Mine(IMPALA):
    """A user's algorithm, whose losses are those of IMPALA and others."""

    returned: Callable[[Losses], Any]

    def losses(self, minibatch: Rollout) -> Losses:
        found: Losses = type(self).returned(super().losses(minibatch))
        return found


def weight(found: Losses) -> Tensor:
    """Returns a scalar that depends on the weights."""
    return found.terms["pg_loss"]


def with_term(term: Callable[[Losses], Any]) -> Callable[[Losses], Any]:
    return lambda found: Losses({**found.terms, "my_loss": term(found)}, found.metrics)


def with_metric(metric: Any) -> Callable[[Losses], Any]:
    return lambda found: Losses(found.terms, {"my_metric": metric})


MISTAKES = {
    "a term for each step": (
        with_term(lambda found: weight(found) * RAW),
        r"Mine.losses: the term my_loss must be a scalar, got shape \[5, 4\]: sum it over the step",
    ),
    "a term with a dimension": (with_term(lambda found: weight(found)[None]), r"got shape \[1\]"),
    "a number": (with_term(lambda found: 0.5), "term my_loss must be a scalar tensor, got float"),
    "a constant": (
        with_term(lambda found: weight(found).detach()),
        "Mine.losses: the term my_loss must depend on a parameter, got a constant: compute it",
    ),
    "a dict": (
        lambda found: dict(found.terms),
        r"Mine.losses must return Losses\(terms, metrics\), got dict",
    ),
    "nothing": (lambda found: None, "got NoneType"),
    "no terms": (lambda found: Losses({}), "Mine.losses must return at least one term"),
    "a metric for each step": (
        with_metric(RAW),
        r"Mine.losses: the metric my_metric must be a scalar, got shape \[5, 4\]: take losses.mean",
    ),
    "a metric that is a number": (with_metric(1.0), "the metric my_metric must be a scalar tensor"),
    "a mean for each step": (with_metric(Mean(RAW, RAW.sum())), r"my_metric .* got shape \[5, 4\]"),
}


def net() -> MLPNet:
    return MLPNet(ArraySpec((4,), "float32"), Discrete(3), False)


def learn(returned: Callable[[Losses], Any], make_rollout: Make) -> Any:
    step = impala(net(), type("Mine", (Mine,), {"returned": returned}))
    before = [parameter.clone() for parameter in step.algo.actor.parameters()]
    try:
        return step.update(make_rollout(T, B)).metrics
    finally:
        after = list(step.algo.actor.parameters())
        is_same = all(map(torch.equal, before, after))
        assert is_same == (step.counters.optimiser_steps == 0)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_losses_that_cannot_be_minimised_or_logged_are_refused(
    mistake: str, make_rollout: Make
) -> None:
    returned, sentence = MISTAKES[mistake]
    with pytest.raises(ValueError, match=sentence):
        learn(returned, make_rollout)


def test_losses_without_a_mistake_are_learnt_from(make_rollout: Make) -> None:
    metrics = learn(with_metric(torch.tensor(2.0)), make_rollout)
    assert metrics["my_metric"] == 2.0
    assert learn(with_metric(losses.mean(RAW)), make_rollout)["my_metric"] == 1.0
    doubled = learn(with_term(weight), make_rollout)
    assert doubled["my_loss"] == doubled["pg_loss"] != 0


class OfAnotherNetwork(IMPALA):
    def losses(self, minibatch: Rollout) -> Losses:
        return Losses({"my_loss": torch.ones((), requires_grad=True) * 2})


def test_terms_of_another_network_than_the_optimisers_are_refused(make_rollout: Make) -> None:
    step = impala(net(), OfAnotherNetwork)
    with pytest.raises(ValueError, match="optimiser actor minimises terms that do not depend on"):
        step.update(make_rollout(T, B))


@pytest.mark.parametrize(
    ("extra", "error", "match"),
    [
        ("policy_logits", ValueError, "Forgetful needs extras.*add 'policy_logits' to its `needs`"),
        ("my_extra", KeyError, "my_extra"),
    ],
)
def test_an_extra_that_is_not_in_needs_is_named(
    extra: str, error: type[Exception], match: str, make_rollout: Make
) -> None:
    def losses(self: IMPALA, minibatch: Rollout) -> Losses:
        return Losses({"loss": minibatch.extras[extra].sum()})

    step = impala(net(), type("Forgetful", (IMPALA,), {"needs": (), "losses": losses}))
    rollout = dataclasses.replace(make_rollout(T, B), extras={})
    with pytest.raises(error, match=match):
        step.update(rollout)


@dataclass(frozen=True, kw_only=True)
class NeedyConfig(IMPALAConfig):
    """Has a setting without a default."""

    boldness: int


@dataclass(kw_only=True)
class MutableConfig:
    """Is not frozen."""


class NoConfig(Algorithm[Rollout]):
    def losses(self, minibatch: Rollout) -> Losses:
        raise NotImplementedError


def declares(**attributes: Any) -> type[IMPALA]:
    return type("Mine", (IMPALA,), attributes)


DECLARED = {
    "reduction": ("avg", "Mine.reduction must be one of sum, mean, got 'avg'"),
    "mode": ("explor", "Mine.mode must be one of sample, greedy, explore, got 'explor'"),
    "needs": ("policy_logits", r"Mine.needs must be a tuple of names such as .* 'policy_logits'"),
    "takes": ("Rollout", "Mine.takes must be a class, got 'Rollout'"),
    "actor_type": (dict, "Mine.actor_type must be a subclass of Actor, got <class 'dict'>"),
    "minimised_by": ("actor", "Mine.minimised_by must be a mapping of terms to names"),
    "Config": (NeedyConfig, "NeedyConfig.boldness has no default: every field needs one"),
}


@pytest.mark.parametrize("attribute", DECLARED)
def test_a_declaration_that_means_nothing_is_refused(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, sentence = DECLARED[attribute]
    monkeypatch.setitem(globals(), "Wrong", declares(**{attribute: value}))
    with pytest.raises(ValueError, match=sentence):
        registry.find_algorithm(f"{__name__}:Wrong")


@pytest.mark.parametrize(("config", "name"), [(MutableConfig, "Mutable"), (dict, "dict")])
def test_a_config_that_is_no_frozen_dataclass_is_refused(
    config: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Wrong", declares(Config=config))
    with pytest.raises(ValueError, match=f"Mine.Config must be a dataclass with .*{name}"):
        registry.config_of(f"{__name__}:Wrong")


def test_an_algorithm_without_a_config_is_refused() -> None:
    with pytest.raises(ValueError, match="NoConfig.Config must be a dataclass with .* got None"):
        registry.find_algorithm(f"{__name__}:NoConfig")


def test_what_the_built_in_algorithms_declare_is_accepted() -> None:
    for attribute in ("reduction", "mode", "needs"):
        assert hasattr(IMPALA, attribute)
    assert dataclasses.is_dataclass(registry.find_algorithm("laser").Config)


class Forgetful(IMPALA):
    def __init__(self, actor: Any, config: Any) -> None:
        self.optimisers = {}


def test_an_algorithm_that_forgot_super_is_refused() -> None:
    algo = Forgetful(net(), None)
    with pytest.raises(ValueError, match=r"Forgetful has no `actor`: its __init__ must call super"):
        checked(algo)
