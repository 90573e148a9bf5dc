# SPDX-License-Identifier: Apache-2.0
"""Assembles a learner: device, dtype, threads, network, algorithm and weights, in this order.

The programs, bench and benchmarks/ all use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from torchbeast.core.actors.agent import Agent
from torchbeast.core.actors.contract import specs_of_extras
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.config import StepConfig
from torchbeast.core.algos.optimiser_step import OptimiserStep, is_separable
from torchbeast.core.specs import ActorSpec
from torchbeast.errors import UsageError, as_usage_error
from torchbeast.learning.config import HardwareConfig
from torchbeast.learning.earlier_run import EarlierRun
from torchbeast.learning.hardware import Compute, choose, share_cores
from torchbeast.learning.weights import PublishedWeights, Publisher
from torchbeast.processes.malloc import keep_freed_memory
from torchbeast.sources.config import RolloutConfig

Weights = TypeVar("Weights", bound=Publisher)
MakeAgent = Callable[[ActorSpec], Agent]
"""Makes the agent of such a network for the run's environment; raises ValueError if it cannot."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The settings of a learner."""

    actor: ActorSpec  # of the network; named "auto": chosen by the observation space
    algo: type[Algorithm[Any]]
    algorithm: Any  # of type algo.Config
    step: StepConfig
    total_steps: int
    rollouts: RolloutConfig
    hardware: HardwareConfig
    reproducible: bool = False  # same results on every machine, see hardware.choose


@dataclass(frozen=True, kw_only=True)
class Assembled(Generic[Weights]):
    """An assembled learner."""

    compute: Compute
    agent: Agent
    optimiser_step: OptimiserStep[Any]
    weights: Weights

    @property
    def algo(self) -> Algorithm[Any]:
        """What it learns with."""
        return self.optimiser_step.algo


def assemble(
    config: LearnerConfig,
    make_agent: MakeAgent,
    make_weights: Callable[[nn.Module, int], Weights],
    earlier: EarlierRun | None = None,
    say: Callable[[Compute, Agent], None] | None = None,
) -> Assembled[Weights]:
    """Assembles a learner on this machine, and restores the state of an earlier run, if any.

    say: called with what is used when the network is on its device, before it is compiled or
        learns.

    Sets torch's number of threads, on which initial weights depend too: call it before other
    threads use torch. Raises UsageError when the earlier run had another network.
    """
    earlier = EarlierRun() if earlier is None else earlier
    compute = choose(config.hardware, config.reproducible)
    if compute.device.type == "cpu":
        keep_freed_memory()
    torch.set_num_threads(compute.threads)
    with as_usage_error():
        agent = make_agent(earlier.actor(config.actor))
    earlier.check_same_model(agent.spec)
    agent.model.to(compute.device)
    agent.model.compute_dtype = compute.dtype
    algo = _algorithm(config, agent)
    if not is_separable(algo):
        compute = dataclasses.replace(compute, bytes_at_once=None, is_whole=True)
    if say is not None:
        say(compute, agent)
    if config.hardware.compile:
        agent.model.compile()  # copies of it, which act, are not compiled
    step = _optimiser_step(algo, config, compute, agent)
    earlier.restore(step)
    weights = make_weights(agent.model, step.version)
    return Assembled(compute=compute, agent=agent, optimiser_step=step, weights=weights)


def assemble_alone(config: LearnerConfig, make_agent: MakeAgent) -> Assembled[PublishedWeights]:
    """Assembles a new learner whose weights are read by threads of this process."""
    return assemble(config, make_agent, PublishedWeights)


def _optimiser_step(
    algo: Algorithm[Any], config: LearnerConfig, compute: Compute, agent: Agent
) -> OptimiserStep[Any]:
    rollouts = config.rollouts
    threads = share_cores(compute, rollouts.batch_size, rollouts.unroll_length, agent)
    return OptimiserStep(
        algo,
        config.step,
        total_steps=config.total_steps,
        bytes_at_once=compute.bytes_at_once,
        num_threads=threads,
    )


def _algorithm(config: LearnerConfig, agent: Agent) -> Algorithm[Any]:
    """Raises UsageError when the model is of another kind, or lacks extras that it needs."""
    try:
        config.algo.check_actor(agent.model)
        specs_of_extras(agent.model, config.algo.needs)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return config.algo(agent.model, config.algorithm)  # its own mistakes keep their traceback
