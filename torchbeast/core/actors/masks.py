# SPDX-License-Identifier: Apache-2.0
"""Action masks: which actions an observation allows.

A dict observation whose entry `action_mask` is one array [n] masks actions: n is the number of a
Discrete space's actions, or of a MultiDiscrete's choices, one after the other (sum of nvec). A
nonzero entry allows a choice, 0 rules it out.

Masked logits are -inf, so that a masked action has the probability 0 exactly. Acting and learning
call the same network with the same observation: both see the same masked policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from torchbeast.core.distributions import ActionDistribution, Categorical, MultiCategorical
from torchbeast.core.envs.spaces import ArraySpec, ObservationSpace
from torchbeast.core.nest_py import Nest
from torchbeast.errors import RunError, UsageError

KEY = "action_mask"
"""The entry of a dict observation that masks actions."""


@dataclass(frozen=True)
class ActionMask:
    """Rules out masked actions of a policy with these numbers of choices."""

    counts: tuple[int, ...]

    def masked(self, logits: Tensor, observation: Nest[Tensor]) -> Tensor:
        """Returns logits [..., n] with -inf where the observation's mask [..., n] is 0.

        A mask of zeros alone, as of an episode's last observation, rules out nothing here.
        """
        return logits.masked_fill(~_effective(observation), -torch.inf)

    def num_allowed(self, observation: Nest[Tensor]) -> Tensor:
        """Returns the number [...] of actions that are not ruled out, of a Discrete space."""
        return _effective(observation).sum(-1)

    def check(self, observation: Nest[Tensor]) -> None:
        """Raises RunError where a mask leaves no choice; waits for the device."""
        choices = torch.split(_allowed(observation), list(self.counts), -1)
        if not bool(torch.stack([choice.any(-1).all() for choice in choices]).all()):
            raise RunError(
                f"an environment's {KEY} rules out every action, so none can be chosen: allow at "
                "least one (1 allows an action, 0 rules it out), or end the episode"
            )


def mask_for(space: ObservationSpace, actions: ActionDistribution) -> ActionMask | None:
    """Returns the mask of observations of this space, None where they have no entry `action_mask`.

    Raises UsageError where the mask does not fit the actions.
    """
    if not has_mask(space):
        return None
    counts, spec = _counts(actions), space[KEY]
    if not isinstance(spec, ArraySpec) or spec.shape != (sum(counts),):
        found = spec.shape if isinstance(spec, ArraySpec) else "several arrays"
        raise UsageError(
            f"an {KEY} in observations needs an entry for each action, the shape "
            f"({sum(counts)},), got {found}: change the environment, without stacks of frames"
        )
    return ActionMask(tuple(counts))


def has_mask(observation: Any) -> TypeGuard[dict[str, Any]]:
    """Returns whether an observation, or its space, has an entry `action_mask`."""
    return isinstance(observation, dict) and KEY in observation


def _counts(actions: ActionDistribution) -> Sequence[int]:
    """Returns the number of actions to choose among, for each choice."""
    if isinstance(actions, Categorical):
        return [actions.num_params]
    if isinstance(actions, MultiCategorical):
        return actions.nvec
    raise UsageError(
        f"an {KEY} in observations needs a Discrete or MultiDiscrete action space, got one with a "
        f"{type(actions).__name__} distribution: rename the entry, or drop it with "
        "--observation_keys"
    )


def _effective(observation: Nest[Tensor]) -> Tensor:
    """Returns which actions are allowed, bool [..., n]: all where the mask allows none."""
    allowed = _allowed(observation)
    return allowed | ~allowed.any(-1, keepdim=True)


def _allowed(observation: Nest[Tensor]) -> Tensor:
    """Returns which actions are allowed, bool [..., n]."""
    assert has_mask(observation)
    mask: Tensor = observation[KEY]
    return mask != 0
