# SPDX-License-Identifier: Apache-2.0
"""Makes the parts of gradient workers: in each a learner with a collection of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from torchbeast.core.algos.ranks import Ranks
from torchbeast.core.specs import Precision
from torchbeast.learner.collection import make_source, make_weights, making_agent
from torchbeast.learning.assemble import LearnerConfig, assemble
from torchbeast.learning.config import HardwareConfig
from torchbeast.processes.system import keep_freed_memory
from torchbeast.schemes.gradients.worker import Made
from torchbeast.schemes.scheme import Scheme
from torchbeast.seeds import seed_of
from torchbeast.sources.contract import Learner


@dataclass(frozen=True, kw_only=True)
class WorkerParts:
    """A function that makes the parts of a gradient worker, in its process."""

    scheme: Scheme
    config: LearnerConfig
    precision: Precision  # of the features of actors
    seed: int  # of the environments and actions of all workers

    def __call__(
        self, index: int, ranks: Ranks | None, stops_early: Callable[[float], bool]
    ) -> Made:
        seed = seed_of(self.seed, "gradient worker", index)
        scheme, ending = self.scheme, ExitStack()
        torch.manual_seed(seed_of(seed, "actions"))
        weights = functools.partial(make_weights, scheme)
        config = dataclasses.replace(self.config, hardware=self._hardware)
        made = assemble(config, making_agent(scheme), weights, ranks=ranks)
        keep_freed_memory(made.compute.device.type)
        learner = Learner(
            agent=made.agent,
            weights=made.weights,
            device=made.compute.device,
            extras=made.algo.needs,
            mode=made.algo.mode,
            rollouts=self.config.rollouts,
            seed=seed,
            spare_columns=0,
            batches_at_once=1,
        )
        return Made(
            source=make_source(scheme, learner, self.precision, ending, stops_early),
            optimiser_step=made.optimiser_step,
            publish=made.weights.publish,
            end=ending.close,
            device=made.compute.device,
        )

    @property
    def _hardware(self) -> HardwareConfig:
        gradients = self.scheme.gradients
        assert gradients is not None  # else there are no such workers
        return HardwareConfig(
            num_learner_threads=1,
            torch_threads=gradients.cores,
            disable_cuda=not gradients.gpus,
        )
