# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of a network by leaf of the observation.

A leaf that is not needed may take most of the time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torchbeast.core.actors.contract import Actor, ModelInputs
from torchbeast.core.actors.encoders import readings
from torchbeast.core.actors.networks import BuiltInNet
from torchbeast.core.actors.off_policy import QNet, SACNet, TD3Net
from torchbeast.core.base.computing import computing_in, one_thread
from torchbeast.core.base.nest import Nest, map_leaves
from torchbeast.core.envs.spaces import ArraySpec, ObservationSpace

_ROWS = 16  # observations in the measured batch
_TRIES = 3


class Cost(NamedTuple):
    """The cost of one leaf's torso, or of a whole network."""

    name: str
    kind: str
    parameters: int
    microseconds: float  # per step, in a forward pass of 16 steps on one core or the GPU


def costs(model: Actor, space: ObservationSpace) -> list[Cost]:
    """Returns the cost of the whole network, then those of its leaves, the most expensive first.

    space: the observation space as the policy sees it. Measured on the model's device, in its
    dtype. A user's own network has no costs by leaf.
    """
    observation = map_leaves(lambda spec: _ones(spec, model, 1, _ROWS), space)
    whole = Cost("network", "", _count(model), _time(model, lambda: _act(model, observation)))
    leaves = list(_of_leaves(model, space))
    return [whole, *sorted(leaves, key=lambda cost: -cost.microseconds)]


def table(found: list[Cost]) -> str:
    """Returns a line for the network and each leaf."""
    return "\n".join(
        f"{cost.name}{f' ({cost.kind})' if cost.kind else ''}: {cost.parameters:,} parameters, "
        f"{cost.microseconds:,.1f} us per step"
        for cost in found
    )


def _torsos(model: Actor) -> Iterable[nn.Module]:
    """Returns the torsos of a built-in network, one for each leaf."""
    if isinstance(model, BuiltInNet):
        return model.leaf_torsos
    return model.features.torsos if isinstance(model, QNet | SACNet | TD3Net) else ()


def _of_leaves(model: Actor, space: ObservationSpace) -> Iterator[Cost]:
    for (path, spec, kind), torso in zip(readings(space), _torsos(model), strict=False):
        microseconds = _time(model, functools.partial(torso, _ones(spec, model, _ROWS)))
        yield Cost(path or "observation", kind, _count(torso), microseconds)


def _ones(spec: ArraySpec, model: nn.Module, *rows: int) -> Tensor:
    """Returns an observation of ones: zeros would mask every action."""
    device = next(model.parameters()).device
    return torch.ones((*rows, *spec.shape), dtype=getattr(torch, spec.dtype), device=device)


def _act(model: Actor, observation: Nest[Tensor]) -> None:
    device = next(model.parameters()).device
    zeros = torch.zeros(1, _ROWS, device=device)
    last, state = (
        map_leaves(lambda leaf: leaf.to(device), nest)
        for nest in (model.distribution.zero_action((1, _ROWS)), model.initial_state(_ROWS))
    )
    model.act(ModelInputs(observation, zeros, zeros.bool(), last), state, "greedy")


def _time(model: Actor, call: Callable[[], object]) -> float:
    """Returns the microseconds per row, the best of several measurements.

    On the CPU that is processor time of one thread, so other load on the machine does not count.
    """
    device = next(model.parameters()).device
    best = float("inf")
    with torch.inference_mode(), computing_in(model.compute_dtype, device), one_thread():
        for _ in range(1 + _TRIES):  # the first call allocates memory
            before = _now(device)
            call()
            best = min(best, _now(device) - before)
    return best / _ROWS * 1e6


def _now(device: torch.device) -> float:
    """Returns a time in seconds; on the CPU the processor time of this thread."""
    if device.type == "cpu":
        return time.thread_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
