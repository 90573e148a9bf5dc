# SPDX-License-Identifier: Apache-2.0
"""The running statistics that the models of an algorithm keep in buffers."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbeast.core.actors.running_norm import Moments, RunningNorm
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.storages.batch import Batch
from torchbeast.core.update.ranks import Ranks, check_same_place


class Statistics:
    """Counts each batch once, or several learners' batches together."""

    def __init__(self, algo: Algorithm[Any]) -> None:
        self._algo = algo
        modules = [module for model in algo.models.values() for module in model.modules()]
        norms = [module for module in modules if isinstance(module, RunningNorm)]
        self._norms = list(dict.fromkeys(norms))  # a module may be in two models

    def observed(self, batch: Batch) -> list[Moments]:
        """Adds a batch, and returns what it adds to each RunningNorm.

        Raises NotImplementedError if the actor keeps statistics elsewhere: nothing says how those
        of several learners would be joined.
        """
        before, others = [norm.moments() for norm in self._norms], self._others()
        self._algo.observe(batch)
        for name, buffer in self._others().items():
            if not torch.equal(buffer, others[name]):
                raise NotImplementedError(
                    f"{type(self._algo.actor).__name__}.observe changes the buffer {name}, but "
                    "several learners can only combine statistics of a RunningNorm: keep them in a "
                    "RunningNorm, or use one learner"
                )
        return [norm.moments().without(was) for norm, was in zip(self._norms, before, strict=True)]

    def add(self, observed: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Adds what several learners observed, in their order.

        observed: for each learner and RunningNorm its Moments, as tensors, arrays or lists.
        """
        for norm, *parts in zip(self._norms, *observed, strict=True):
            seen = [moments for part in parts if (moments := _like(norm, part)).rows]
            norm.set_moments(functools.reduce(Moments.merged, seen, norm.moments()))

    def observe(self, batch: Batch, ranks: Ranks | None) -> None:
        """Adds a batch, or all learners' batches."""
        if ranks is None:
            self._algo.observe(batch)
            return
        before = [norm.moments() for norm in self._norms]
        own = self.observed(batch)
        if not self._norms:
            return
        messages = ranks.gather(
            {"observed": [[part.tolist() for part in moments] for moments in own]}
        )
        check_same_place(messages)
        for norm, moments in zip(self._norms, before, strict=True):
            norm.set_moments(moments)
        self.add([message["observed"] for message in messages])

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restores all buffers of the models if the body fails."""
        buffers = [buffer for model in self._algo.models.values() for buffer in model.buffers()]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        except BaseException:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
            raise

    def _others(self) -> dict[str, Tensor]:
        """Returns copies of the actor's buffers that belong to no RunningNorm."""
        ours = {id(buffer) for norm in self._norms for buffer in norm.buffers()}
        named = self._algo.actor.named_buffers()
        return {name: b.clone() for name, b in named if id(b) not in ours}


def _like(norm: RunningNorm, moments: Sequence[Any]) -> Moments:
    """Returns moments with the dtypes of the norm's, on its device."""
    both = zip(map(np.asarray, moments), norm.moments(), strict=True)
    return Moments(*(torch.tensor(part, dtype=own.dtype, device=own.device) for part, own in both))
