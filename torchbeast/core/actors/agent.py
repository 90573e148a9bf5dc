# SPDX-License-Identifier: Apache-2.0
"""The agent of a run: its network, made from the environment's spaces."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from torchbeast.core.actors.contract import Actor
from torchbeast.core.actors.leaves import Kind, is_large_image, kind_of
from torchbeast.core.actors.registry import make_model
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.envs.spaces import ActionSpace, ArraySpec, ObservationSpace, without_values
from torchbeast.core.nest_py import flatten
from torchbeast.errors import UsageError


class Agent(NamedTuple):
    """What acts and learns."""

    model: Actor
    observation_bytes: int = 0  # of one environment, stacks included
    model_name: str = ""  # what --model names, auto resolved
    observation_space: ObservationSpace = ()  # as the policy sees it, stacks included
    reads_values: bool = True  # whether the space says anything of values that the network reads


def make_agent(
    model_name: str,
    observation_space: ObservationSpace,
    action_space: ActionSpace,
    frame_stack: int,
    use_lstm: bool,
    for_images: str = "deep",
    reads_values: bool = True,
) -> Agent:
    """The agent for these spaces; UsageError when the model does not fit them.

    observation_space: nest of ArraySpec of one environment, before frames are stacked.
    for_images: what auto chooses where there is an image.
    reads_values: the network reads leaves by what the space says of their values; False: by dtype
        and shape alone, as networks of older checkpoints did.
    """
    seen = stacked_space(observation_space, frame_stack)
    if not reads_values:
        seen = without_values(seen)
    name = default_model(seen, for_images) if model_name == "auto" else model_name
    try:
        model = make_model(name, seen, action_space, use_lstm)
    except Exception as error:  # a user's model may raise anything
        raise UsageError(f"--model {name} does not work with this environment: {error}") from error
    size = sum(_num_bytes(spec) for spec in flatten(seen))
    return Agent(model, size, name, seen, seen != without_values(seen))


def _num_bytes(spec: ArraySpec) -> int:
    return math.prod(spec.shape) * np.dtype(spec.dtype).itemsize


def default_model(observation_space: ObservationSpace, for_images: str = "deep") -> str:
    """`for_images` where there is an image, small where all are too small for it, or maps, else
    mlp.
    """
    specs: list[ArraySpec] = flatten(observation_space)
    if any(is_large_image(spec) for spec in specs):
        return for_images
    return "small" if any(_has_places(spec) for spec in specs) else "mlp"


def _has_places(spec: ArraySpec) -> bool:
    """Whether neighbours belong together. Two dimensions of floats may be any table."""
    is_small_image = kind_of(spec) is Kind.IMAGE and len(spec.shape) == 3
    return is_small_image or kind_of(spec) in (Kind.MAP, Kind.STRINGS)
