# SPDX-License-Identifier: Apache-2.0
"""Makes the gradient workers of a plan, in each of which a learner collects for itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing

import torch

from torchbeast.core.update.ranks import Ranks
from torchbeast.fleets.fleet import Fleet
from torchbeast.fleets.system import keep_freed_memory
from torchbeast.gradients.config import GradientConfig
from torchbeast.gradients.worker import WorkerParts
from torchbeast.gradients.workers import GradientWorkers, gradient_workers
from torchbeast.run.assemble import Assembled, assemble
from torchbeast.run.config import HardwareConfig
from torchbeast.run.plan import Plan
from torchbeast.seeds import seed_of


def gradient_workers_of(
    config: GradientConfig,
    make_fleet: Callable[[], AbstractContextManager[Fleet]],
    plan: Plan,
    made: Assembled,
    seed: int,
    ending: ExitStack,
) -> GradientWorkers:
    """Returns the gradient workers of a run, each with a learner as the plan says.

    made: the learner of this process, whose network all have. seed: of the environments and actions
    of all workers. `ending` ends them.
    """
    hardware = HardwareConfig(
        num_learner_threads=1, torch_threads=config.cores, disable_cuda=not config.gpus
    )
    learner = dataclasses.replace(plan.learner, actor=made.agent.spec, hardware=hardware)
    sent = dataclasses.replace(plan, learner=learner, gradients=None, loggers=(), callbacks=())
    make = functools.partial(make_worker, sent, seed)
    fleet = ending.enter_context(make_fleet())
    workers = gradient_workers(make, config, made.optimiser_step, fleet)
    return ending.enter_context(closing(workers))


def make_worker(
    plan: Plan, seed: int, index: int, ranks: Ranks | None, stops_early: Callable[[float], bool]
) -> WorkerParts:
    """Makes the parts of a gradient worker, in its process."""
    own, ending = seed_of(seed, "gradient worker", index), ExitStack()
    torch.manual_seed(seed_of(own, "actions"))
    actor, weights = plan.learner.actor, plan.collection.weights
    made = assemble(plan.learner, lambda _: plan.make_agent(actor), weights, ranks=ranks)
    keep_freed_memory(made.compute.device.type)
    keywords = plan.env.options.info_keywords
    learner = made.learner_info(plan.learner, keywords, own, stops_early=stops_early)
    return WorkerParts(
        source=plan.collection.source(learner, plan.env, ending),
        optimiser_step=made.optimiser_step,
        publish=made.weights.publish,
        end=ending.close,
        device=made.compute.device,
    )
