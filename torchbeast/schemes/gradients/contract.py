# SPDX-License-Identifier: Apache-2.0
"""The interface between gradient workers and what they are made of.

make(Place(index, count, ranks, ...)) -> Made(source, optimiser_step, ...)     in each worker
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchbeast.core.algos.optimiser_step import OptimiserStep
from torchbeast.core.algos.ranks import Ranks
from torchbeast.sources.contract import Source


@dataclass(frozen=True, kw_only=True)
class Place:
    """A worker's place among all of them."""

    index: int
    """Give each worker's environments and random numbers seeds of their own by this."""
    count: int
    ranks: Ranks | None
    """Goes to the OptimiserStep; None where another process applies the gradients."""
    stops_early: Callable[[float], bool]
    """A source that can be cut short calls it after every step with the share of its batch that it
    has collected. Where it returns true the batch ends: its other steps are not valid, repeat the
    last row, and do not count as collected."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """The parts of a worker."""

    source: Source
    optimiser_step: OptimiserStep[Any]
    publish: Callable[[nn.Module, int], None] = lambda model, version: None
    """Gives the source the weights to act with, and their version, before each batch. The model is
    that of the optimiser step."""
    end: Callable[[], None] = lambda: None
    """Ends what the source has started, such as environments and processes, once it is closed."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Of the models; batches are moved to it."""


Make = Callable[[Place], Made]
"""Makes the parts of a worker, in its process. It is sent there by cloudpickle where that is
installed, by pickle otherwise."""
