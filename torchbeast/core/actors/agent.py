# SPDX-License-Identifier: Apache-2.0
"""The agent of a run: a network made for the environment's spaces."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torchbeast.core.actors.contract import Actor
from torchbeast.core.actors.leaves import Kind, is_large_image, kind_of
from torchbeast.core.actors.registry import MODELS, make_model
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.envs.spaces import (
    ActionSpace,
    ArraySpec,
    ObservationSpace,
    num_bytes,
    without_values,
)
from torchbeast.core.nest_py import flatten
from torchbeast.core.specs import ActorSpec, values_in
from torchbeast.errors import RunError, UsageError, what_it_raised


class Agent(NamedTuple):
    """A network that acts and learns, and what it was made for."""

    model: Actor
    spec: ActorSpec  # of the model; "auto" resolved, reads_values only if the space declares values
    observation_bytes: int = 0  # of one environment, with frames stacked
    observation_space: ObservationSpace = ()  # as the policy sees it, with frames stacked
    frame_stack: int = 1  # number of frames in a stack


def make_agent(
    spec: ActorSpec,
    observation_space: ObservationSpace,
    action_space: ActionSpace,
    frame_stack: int,
    for_images: str = "deep",
) -> Agent:
    """Makes the agent for these spaces.

    Raises UsageError when there is no such model, or it does not fit the spaces, and RunError, with
    the traceback, when a model that is not built in raises an exception.

    observation_space: nest of ArraySpec of one environment, before frames are stacked.
    for_images: the model that "auto" selects for observations with an image.
    """
    seen = stacked_space(observation_space, frame_stack)
    if not spec.reads_values:
        seen = without_values(seen)
    is_open = ":" not in spec.name and spec.name.endswith("auto")  # "q-auto" too
    usual = spec.name.removesuffix("auto") + default_model(seen, for_images)
    name = usual if is_open else spec.name
    reads_values = seen != without_values(seen)
    resolved = dataclasses.replace(spec, name=name, reads_values=reads_values)
    try:
        model = make_model(resolved, seen, action_space)
    except UsageError:
        raise
    except Exception as error:
        if name not in MODELS:
            raise RunError(f"the model {name} failed: {what_it_raised(error)}") from error
        given = f" with {values_in(spec.kwargs)}" if spec.kwargs else ""
        raise UsageError(
            f"the model {name}{given} does not work with this environment: {error}"
        ) from error
    return Agent(model, resolved, num_bytes(seen), seen, frame_stack)


def default_model(observation_space: ObservationSpace, for_images: str) -> str:
    """Returns the model that "auto" selects.

    That is `for_images` if a leaf is an image of sufficient size, "small" for smaller images and
    maps, and "mlp" for everything else.
    """
    specs: list[ArraySpec] = flatten(observation_space)
    if any(is_large_image(spec) for spec in specs):
        return for_images
    return "small" if any(_has_places(spec) for spec in specs) else "mlp"


def _has_places(spec: ArraySpec) -> bool:
    """Returns whether neighbouring entries are related; a 2-d array of floats may be any table."""
    is_small_image = kind_of(spec) is Kind.IMAGE and len(spec.shape) > 2
    return is_small_image or kind_of(spec) in (Kind.MAP, Kind.STRINGS)
