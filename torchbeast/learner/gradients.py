# SPDX-License-Identifier: Apache-2.0
"""Makes the gradient workers of a scheme, in each of which a learner collects for itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import torch

from torchbeast.core.update.ranks import Ranks
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.fleet import Fleet, LocalFleet
from torchbeast.fleets.system import environment_of_share, keep_freed_memory
from torchbeast.gradients.config import GradientConfig
from torchbeast.gradients.worker import WorkerParts
from torchbeast.gradients.workers import WORKER
from torchbeast.learner.parts import make_source, making_agent, making_weights, ray_fleet
from torchbeast.on_ray.config import RayConfig
from torchbeast.on_ray.fleet import gradient_actors
from torchbeast.run.assemble import LearnerConfig, assemble
from torchbeast.run.config import HardwareConfig
from torchbeast.schemes.scheme import Scheme
from torchbeast.seeds import seed_of


def make_worker(
    scheme: Scheme,
    config: LearnerConfig,
    seed: int,
    index: int,
    ranks: Ranks | None,
    stops_early: Callable[[float], bool],
) -> WorkerParts:
    """Makes the parts of a gradient worker, in its process.

    config: of the run's learner, with the network that it has made. seed: of the environments and
    actions of all workers.
    """
    gradients = scheme.gradients
    assert gradients is not None  # else there are no such workers
    hardware = HardwareConfig(
        num_learner_threads=1, torch_threads=gradients.cores, disable_cuda=not gradients.gpus
    )
    own, ending = seed_of(seed, "gradient worker", index), ExitStack()
    torch.manual_seed(seed_of(own, "actions"))
    own_config = dataclasses.replace(config, hardware=hardware)
    agent = functools.partial(making_agent(scheme), config.actor)
    made = assemble(own_config, lambda _: agent(), making_weights(scheme), ranks=ranks)
    keep_freed_memory(made.compute.device.type)
    learner = made.learner(config.rollouts, own, spare_columns=0, batches_at_once=1)
    return WorkerParts(
        source=make_source(scheme, learner, config, ending, stops_early),
        optimiser_step=made.optimiser_step,
        publish=made.weights.publish,
        end=ending.close,
        device=made.compute.device,
    )


def gradient_fleet(
    scheme: Scheme, gradients: GradientConfig, spec: EnvSpec
) -> AbstractContextManager[Fleet]:
    """Returns the fleet of the gradient workers; spec: of their environments."""
    if scheme.grad_backend == "processes":
        return LocalFleet(WORKER, environment_of_share(gradients.cores))
    actors = gradient_actors(scheme.grad_cpus, gradients.gpus)
    return ray_fleet(scheme, spec, RayConfig(), actors)
