# SPDX-License-Identifier: Apache-2.0
"""The state of an algorithm in a checkpoint.

    model_state_dict      of the actor
    optimizer_state_dict  of the only optimiser; {} where there are several
    algorithm_state_dict  {"models": {name: ...}, "optimisers": {name: ...}}: the other models, and
                          the optimisers where there are several; absent where there are none

The first two are in all earlier checkpoints, and in the original TorchBeast's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from torchbeast.core.algos.base import Algorithm, Optimizer

ALGORITHM = "algorithm_state_dict"
# Settings that tell optimisers apart whose parameters have equal shapes.
_KINDS = {"alpha": "RMSprop", "betas": "Adam"}


def state_of(algo: Algorithm[Any]) -> dict[str, Any]:
    """Returns the state by the keys above; tensors are not copied."""
    only, further = _optimiser(algo), _further(algo)
    state: dict[str, Any] = {
        "model_state_dict": algo.actor.state_dict(),
        "optimizer_state_dict": only.state_dict() if only else {},
    }
    if any(further.values()):
        state[ALGORITHM] = {
            kind: {name: thing.state_dict() for name, thing in things.items()}
            for kind, things in further.items()
        }
    return state


def check_state(algo: Algorithm[Any], state: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the first difference, if `restore` cannot restore the state."""
    check_fits(algo.actor, state["model_state_dict"])
    saved, expected = _further_state(state), _further(algo)
    for kind, things in expected.items():
        _check_names(algo, kind, set(things), set(saved[kind]))
    for name, model in expected["models"].items():
        check_fits(model, saved["models"][name])
    if only := _optimiser(algo):
        _check_optimiser("", only, state["optimizer_state_dict"])
    for name, optimiser in expected["optimisers"].items():
        _check_optimiser(f" {name}", optimiser, saved["optimisers"][name])


def restore(algo: Algorithm[Any], state: Mapping[str, Any]) -> None:
    """Restores the result of `state_of`; call `check_state` first."""
    algo.actor.load_state_dict(state["model_state_dict"])
    if only := _optimiser(algo):
        only.load_state_dict(state["optimizer_state_dict"])
    saved = _further_state(state)
    for kind, things in _further(algo).items():
        for name, thing in things.items():
            thing.load_state_dict(saved[kind][name])


def _optimiser(algo: Algorithm[Any]) -> Optimizer | None:
    """Returns the only optimiser; None where there are several."""
    return next(iter(algo.optimisers.values())) if len(algo.optimisers) == 1 else None


def _further(algo: Algorithm[Any]) -> dict[str, dict[str, Any]]:
    """Returns the other models than the actor, and the optimisers if there are several."""
    models = {name: model for name, model in algo.models.items() if model is not algo.actor}
    return {"models": models, "optimisers": {} if _optimiser(algo) else algo.optimisers}


def _further_state(state: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    return state.get(ALGORITHM, {"models": {}, "optimisers": {}})


def _check_names(algo: Algorithm[Any], kind: str, expected: set[str], saved: set[str]) -> None:
    if expected != saved:
        raise ValueError(
            "the checkpoint belongs to another algorithm: in addition to the actor it has the "
            f"{kind} {_listed(saved)}, but {type(algo).__name__} has {_listed(expected)}; use the "
            "algorithm and settings it was trained with"
        )


def _check_optimiser(name: str, optimiser: Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises ValueError if one of both is Adam and the other RMSprop, or they have other groups.

    name: "", or the name after a space.
    """
    if "param_groups" not in optimiser.state_dict():  # an optimiser of another form
        return
    now, before = _groups(optimiser.param_groups), _groups(saved.get("param_groups", []))
    if now != before:
        raise ValueError(
            f"the checkpoint's optimiser{name} is different: it has {before}, but the algorithm's "
            f"has {now}; use the algorithm and settings it was trained with"
        )


def _groups(groups: Sequence[Mapping[str, Any]]) -> str:
    """Describes the groups of an optimiser, such as "12 parameters of Adam"."""
    kinds = ["".join(f" of {_KINDS[name]}" for name in _KINDS if name in each) for each in groups]
    both = zip(groups, kinds, strict=True)
    return ", ".join(f"{len(group['params'])} parameters{kind}" for group, kind in both)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


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
