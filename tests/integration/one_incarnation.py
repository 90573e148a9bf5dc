# SPDX-License-Identifier: Apache-2.0
"""IMPALA that refuses rollouts in which one environment does not follow the other step by step."""

from __future__ import annotations

from typing import Any

import torch

from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.storages.rollout import Rollout


class OneIncarnation(IMPALA):
    """Learns from environments.Marked only."""

    def losses(self, minibatch: Rollout) -> Losses:
        check(minibatch.observation)
        return super().losses(minibatch)


def check(observation: Any) -> None:
    """Raises ValueError unless every column [T + 1] is of one environment, without a gap."""
    number, steps = observation[..., 0], observation[..., 1].double() * (1 << 12)
    if (number != number[:1]).any():
        raise ValueError("a rollout has steps of two environments")
    if not torch.equal((steps[1:] - steps[:-1]) % (1 << 12), torch.ones_like(steps[1:])):
        raise ValueError("a rollout leaves out a step or has one twice")
