# SPDX-License-Identifier: Apache-2.0
"""The state of an algorithm in a checkpoint.

    model_state_dict      of the actor
    optimizer_state_dict  of the only optimiser; {} where there are several
    algorithm_state_dict  {"models": {name: ...}, "optimisers": {name: ...}}: the other models, and
                          the optimisers where there are several; absent where there are none

The first two are in all earlier checkpoints, and in the original TorchBeast's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchbeast.core.algos.base import Algorithm, Optimizer

ALGORITHM = "algorithm_state_dict"
# Settings that tell optimisers apart whose parameters have equal shapes.
_KINDS = {"alpha": "RMSprop", "betas": "Adam"}


def state_of(algo: Algorithm[Any]) -> dict[str, Any]:
    """Returns the state by the keys above; tensors are not copied."""
    models = {name: m.state_dict() for name, m in algo.models.items() if m is not algo.actor}
    optimisers = {name: optimiser.state_dict() for name, optimiser in algo.optimisers.items()}
    only = optimisers.popitem()[1] if len(optimisers) == 1 else {}
    state: dict[str, Any] = {
        "model_state_dict": algo.actor.state_dict(),
        "optimizer_state_dict": only,
    }
    if models or optimisers:
        state[ALGORITHM] = {"models": models, "optimisers": optimisers}
    return state


def restore(algo: Algorithm[Any], state: Mapping[str, Any]) -> None:
    """Restores the result of `state_of`.

    Raises ValueError, naming the first difference, with nothing changed, if it belongs to another
    model, algorithm or optimiser.
    """
    further = state.get(ALGORITHM, {"models": {}, "optimisers": {}})
    models: Mapping[str, Any] = {"actor": state["model_state_dict"], **further["models"]}
    only = dict.fromkeys(algo.optimisers, state["optimizer_state_dict"])
    optimisers: Mapping[str, Any] = further["optimisers"] or only
    _check_names("models", algo, algo.models, models)
    _check_names("optimisers", algo, algo.optimisers, optimisers)
    for name, model in algo.models.items():
        check_fits(model, models[name])
        _check_order(name, model, models[name])
    for name, optimiser in algo.optimisers.items():
        _check_optimiser(name, optimiser, optimisers[name])
    for name, model in algo.models.items():
        model.load_state_dict(models[name])
    for name, optimiser in algo.optimisers.items():
        optimiser.load_state_dict(optimisers[name])


def _check_names(
    kind: str, algo: Algorithm[Any], expected: Collection[str], saved: Collection[str]
) -> None:
    if sorted(expected) != sorted(saved):
        raise ValueError(
            f"the checkpoint belongs to another algorithm: it has the {kind} "
            f"{', '.join(sorted(saved))}, but {type(algo).__name__} has "
            f"{', '.join(sorted(expected))}; use the algorithm and settings it was trained with"
        )


def _check_order(name: str, model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raises ValueError for other orders of parameters, by which optimisers number their state."""
    parameters = dict(model.named_parameters())
    if [n for n in model.state_dict() if n in parameters] != [n for n in saved if n in parameters]:
        raise ValueError(
            f"the layers of the checkpoint's {name} have another order, which the state of its "
            "optimiser follows: define them in the order it was trained with"
        )


def _check_optimiser(name: str, optimiser: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises ValueError if one of both is Adam and the other RMSprop, or they have other groups."""
    if "param_groups" not in optimiser.state_dict():  # an optimiser of another form
        return
    now, before = _groups(optimiser.param_groups), _groups(saved.get("param_groups", []))
    if now != before:
        raise ValueError(
            f"the checkpoint's optimiser {name} is different: it has {before}, but the algorithm's "
            f"has {now}; use the algorithm and settings it was trained with"
        )


def _groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """Describes the groups of an optimiser, such as "12 parameters of Adam"."""
    kinds = ["".join(f" of {_KINDS[name]}" for name in _KINDS if name in group) for group in groups]
    both = zip(groups, kinds, strict=True)
    return ", ".join(f"{len(group['params'])} parameters{kind}" for group, kind in both)


def check_fits(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises ValueError that names the first tensor in which a state_dict and the module differ."""
    shapes = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    stored = {name: list(tensor.shape) for name, tensor in state.items()}
    for name in [*shapes, *stored]:
        if shapes.get(name) != stored.get(name):
            raise ValueError(
                f"the checkpoint belongs to another model: {name} is {stored.get(name, 'missing')} "
                f"in the checkpoint and {shapes.get(name, 'missing')} in the model; use the model, "
                "environment and version of torchbeast that it was trained with"
            )
