# SPDX-License-Identifier: Apache-2.0
"""The learner's forward pass over a rollout, with values of truncated episodes' final observations.

The return of a truncated episode continues with the value of its last observation, which no row
of the rollout holds (the row has the next episode's first). That value needs the
recurrent state from just before the reset, so a recurrent model runs in segments, cut at the
rows with truncations; a feed-forward one runs once over all rows. Where a replay
needs the state before row T (`feeds_back`), that row is a segment too: the next unroll begins
there. Burn-in (Kapturowski et al. 2019) ends a segment as well: rows before it have no graph.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from torchbeast.core.actors.contract import ModelInputs, ModelOutput
from torchbeast.core.base.nest import Nest, flatten, map_leaves
from torchbeast.core.storages.rollout import Rollout

Model = Callable[[ModelInputs, Nest[Tensor]], ModelOutput]


class Unrolled(NamedTuple):
    """A model's outputs on a rollout of T + 1 rows.

    Attributes:
        policy_logits: float [T+1, B, num_params], the params of the policy's distribution.
        baseline: float [T+1, B], the values.
        final_values: float [T, B], the value of the final observation where row t+1 was truncated,
            else 0.
        final_state: Leaves [layers, B, hidden], the recurrent state after rows 0..T-1, if the
            rollout `feeds_back`.
    """

    policy_logits: Tensor
    baseline: Tensor
    final_values: Tensor
    final_state: Nest[Tensor] | None = None


def unroll(model: Model, rollout: Rollout, burn_in: int = 0) -> Unrolled:
    """Returns a model's policies and values for all rows of a rollout.

    A recurrent model starts from the rollout's initial_agent_state.

    Args:
        model: The actor-critic, or a function with its signature.
        rollout: Rollouts of T steps in B columns.
        burn_in: Number of first rows that only advance the recurrent state, without a graph.

    Example:
        ```python
        policy_logits, values, final_values, _ = unroll(self.actor, minibatch)
        ```
    """
    outputs = []
    final_values = torch.zeros_like(rollout.reward[1:])
    rows, columns = rollout.truncations()
    state, final_state = rollout.initial_agent_state, None
    for start, end in pairwise(_cuts(rollout, rows, burn_in)):
        with torch.set_grad_enabled(torch.is_grad_enabled() and start >= burn_in):
            output = model(inputs_of_rows(rollout, start, end), state)
        outputs.append(output)
        state = output.core_state
        here = ((start < rows) & (rows <= end)).nonzero().flatten() if len(rows) else rows
        if len(here):
            where = rows[here], columns[here]
            finals = _final_values(model, rollout, here, where, state)
            final_values[where[0] - 1, where[1]] = finals
        if end == rollout.unroll_length and rollout.feeds_back:
            final_state = map_leaves(Tensor.detach, state)
    logits = torch.cat([output.policy_logits for output in outputs])
    values = torch.cat([output.baseline for output in outputs])
    return Unrolled(logits, values, final_values, final_state)


def policies_and_values(model: Model, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Returns a model's policies and values before each of the T actions, without the last row.

    Args:
        model: The actor-critic, or a function with its signature.
        rollout: Rollouts of T steps in B columns.

    Returns:
        Policy logits [T, B, num_params] and values [T, B] of rows 0..T-1.
    """
    rows = inputs_of_rows(rollout, 0, rollout.unroll_length)
    output = model(rows, rollout.initial_agent_state)
    return output.policy_logits, output.baseline


def _cuts(rollout: Rollout, truncated: Tensor, burn_in: int) -> list[int]:
    """Returns the first rows of the segments, and T + 1; one segment for a feed-forward model.

    truncated: [K] rows with truncations.
    """
    last = rollout.unroll_length
    if not flatten(rollout.initial_agent_state):
        return [0, last + 1]
    asked = [last] if rollout.feeds_back else []
    return sorted({0, burn_in, *truncated.tolist(), *asked, last + 1})


def inputs_of_rows(rollout: Rollout, start: int, end: int) -> ModelInputs:
    """Returns rows start..end-1 as inputs of a network, with 0 for NaN and infinities in invalid
    rows.

    Args:
        rollout: Rollouts of T steps in B columns.
        start: The first row.
        end: The row after the last one, at most T + 1.
    """
    valid = None if rollout.valid is None else rollout.valid[start:end].bool()

    def rows(leaf: Tensor) -> Tensor:
        leaf = leaf[start:end]
        if valid is None or not leaf.is_floating_point():
            return leaf
        # NaN and infinities would make the network's gradients NaN even where the loss is masked.
        sure = valid.reshape(*valid.shape, *[1] * (leaf.dim() - 2))
        return leaf.where(sure | leaf.isfinite(), 0.0)

    return ModelInputs(
        observation=map_leaves(rows, rollout.observation),
        reward=rows(rollout.reward),
        done=rows(rollout.done),
        last_action=map_leaves(rows, rollout.action),
    )


@torch.no_grad()
def _final_values(
    model: Model, rollout: Rollout, which: Tensor, where: tuple[Tensor, Tensor], state: Nest[Tensor]
) -> Tensor:
    """Returns values [K'] of the final observations `which` [K'].

    where: their rows and columns, [K'] each. state: of all columns, before the reset.
    """
    inputs = ModelInputs(
        observation=map_leaves(lambda leaf: leaf[which].unsqueeze(0), rollout.final_observation),
        reward=rollout.reward[where].unsqueeze(0),
        done=torch.zeros_like(rollout.done[where]).unsqueeze(0),
        last_action=map_leaves(lambda leaf: leaf[where].unsqueeze(0), rollout.action),
    )
    values: Tensor = model(inputs, map_leaves(lambda leaf: leaf[:, where[1]], state)).baseline
    return values.squeeze(0).float()
