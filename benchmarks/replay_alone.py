# SPDX-License-Identifier: Apache-2.0
"""LASER without its online data, to see what they are good for (`replay_learning.py`).

    PYTHONPATH=benchmarks python -m torchbeast.monobeast ... --algo replay_alone:ReplayAlone \
        --replay_size 200000 --learn_start 20000

New rollouts go to the replay as usual, but only replayed columns are learnt from.
"""

from __future__ import annotations

import dataclasses

import torch

from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.laser import LASER
from torchbeast.core.losses import both
from torchbeast.core.storages.rollout import Rollout


class ReplayAlone(LASER):
    """V-trace on replayed rollouts, all of them; nothing is learnt before there are any."""

    def losses(self, minibatch: Rollout) -> Losses:
        """Returns the losses of the replayed columns as if they were online, so that the entropy
        bonus counts there too.
        """
        replayed = minibatch.replayed
        learnt = torch.zeros_like(minibatch.done) if replayed is None else replayed
        valid = both(minibatch.valid, learnt)
        return super().losses(dataclasses.replace(minibatch, valid=valid, replayed=None))
