# SPDX-License-Identifier: Apache-2.0
"""How the gradients of several workers become updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torchbeast.core.base.checks import above, at_least, between, one_of
from torchbeast.errors import IncompatibleParts

Communication = Literal["synchronous", "asynchronous"]
"""synchronous: everyone contributes to every step. asynchronous: a step for each contribution, as
they come; nobody waits for a slow worker."""

UpdateExecution = Literal["centralised", "decentralised"]
"""centralised: one process applies the gradients and sends the weights. decentralised: the workers
join their gradients, and each applies them."""


@dataclass(frozen=True, kw_only=True)
class GradientConfig:
    """Workers that compute gradients, and their updates.

    Each worker collects batches of its own, of the size that its source has. With synchronous
    workers an optimiser step learns from num_workers such batches at once, as one learner would
    with a batch of so many times the columns: algorithms whose terms are sums then need the
    learning rate of that larger batch. With asynchronous ones it learns from one.
    """

    num_workers: int
    communication: Communication = "synchronous"
    update_execution: UpdateExecution = "centralised"
    fraction_workers: float = 1.0
    """Share of the workers that must have collected their batch before the others are told to
    stop; at 1 all collect whole batches."""
    fraction_samples: float = 1.0
    """Share of its batch that a worker collects even if it is told to stop. The steps that are
    missing are not valid, and no env steps."""
    max_lag: int = 32
    """Most optimiser steps by others between the weights that an asynchronous gradient was computed
    with and its own step. A gradient that is older is dropped, and counted as such."""
    cores: int = 1
    """Processor cores that a worker uses."""
    gpus: float = 0.0
    """GPUs of a worker, which learns on the one that it sees; with less than 1 others share it."""

    def __post_init__(self) -> None:
        one_of(get_args(Communication), communication=self.communication)
        one_of(get_args(UpdateExecution), update_execution=self.update_execution)
        at_least(1, num_workers=self.num_workers, cores=self.cores)
        at_least(0, max_lag=self.max_lag, gpus=self.gpus)
        above(0, fraction_workers=self.fraction_workers)
        between(0, 1, fraction_workers=self.fraction_workers)
        between(0, 1, fraction_samples=self.fraction_samples)
        if self.is_decentralised and not self.is_synchronous:
            raise IncompatibleParts(
                'update_execution="decentralised" joins the gradients of all workers, and '
                'grad_communication="asynchronous" waits for none: choose synchronous '
                "gradients, or a centralised update"
            )
        if self.has_stragglers and not self.is_synchronous:
            raise IncompatibleParts(
                f"fraction_workers {self.fraction_workers:g} stops workers for which others wait, "
                'and with grad_communication="asynchronous" none does: leave it out'
            )

    @property
    def is_synchronous(self) -> bool:
        """Whether everyone contributes to every step."""
        return self.communication == "synchronous"

    @property
    def is_decentralised(self) -> bool:
        """Whether every worker applies the joint gradients."""
        return self.update_execution == "decentralised"

    @property
    def has_stragglers(self) -> bool:
        """Whether workers are told to stop."""
        return self.fraction_workers < 1.0
