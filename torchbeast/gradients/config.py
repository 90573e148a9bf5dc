# SPDX-License-Identifier: Apache-2.0
"""How the gradients of several workers become updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torchbeast.core.base.checks import Settings, above, at_least, between, setting
from torchbeast.errors import IncompatibleParts

Communication = Literal["synchronous", "asynchronous"]
"""synchronous: every worker contributes to every optimiser step. asynchronous: each contribution is
an optimiser step as soon as it arrives, so that nobody waits for a straggler."""

UpdateExecution = Literal["centralised", "decentralised"]
"""centralised: one process, a parameter server, applies the gradients and sends the weights to the
workers. decentralised: the workers all-reduce their gradients, and each applies the result."""


@dataclass(frozen=True, kw_only=True)
class GradientConfig(Settings):
    """Workers that compute gradients, and their updates.

    Each worker collects its own batches. With synchronous workers an optimiser step uses
    num_workers batches, like a single learner whose batch is num_workers times as large. If the
    algorithm's losses are sums, choose the learning rate for that larger batch. With asynchronous
    workers a step uses one batch.
    """

    num_workers: int
    communication: Communication = "synchronous"
    update_execution: UpdateExecution = "centralised"
    fraction_workers: float = setting(1.0, bounds=(above, 0))
    """Preempt stragglers as in DD-PPO (Wijmans et al. 2020): once this share of the workers have
    their batch, the others stop collecting. 1: all collect complete batches."""
    fraction_samples: float = setting(1.0, bounds=(between, 0, 1))
    """Share of its batch that a straggler collects in any case. Missing steps are masked and do not
    count as env steps."""
    max_gradient_lag: int = setting(32, bounds=(at_least, 0))
    """Drop (and count) asynchronous gradients that were computed with weights more than this many
    optimiser steps old."""
    cores: int = setting(1, bounds=(at_least, 1))
    """CPU cores that a worker uses."""
    gpus: float = setting(0.0, bounds=(at_least, 0))
    """GPUs per worker, which computes on the one that it sees. Below 1, workers share a GPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, num_workers=self.num_workers)
        between(0, 1, fraction_workers=self.fraction_workers)
        if self.update_execution == "decentralised" and not self.is_synchronous:
            raise IncompatibleParts(
                'update_execution="decentralised" waits for the gradients of all workers, but '
                'grad_communication="asynchronous" does not wait: set '
                'grad_communication="synchronous" or update_execution="centralised"'
            )
        if self.fraction_workers < 1 and not self.is_synchronous:
            raise IncompatibleParts(
                f"fraction_workers {self.fraction_workers:g} stops slow workers so that others "
                'need not wait, but with grad_communication="asynchronous" no worker waits: remove '
                "it"
            )

    @property
    def is_synchronous(self) -> bool:
        """Whether every worker contributes to every optimiser step."""
        return self.communication == "synchronous"
