# SPDX-License-Identifier: Apache-2.0
"""Assembles a learner: device, dtype, threads, network, algorithm and weights, in this order.

The programs, bench and benchmarks/ all use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from torch import nn

from torchbeast.core.actors.agent import Agent
from torchbeast.core.actors.contract import specs_of_extras
from torchbeast.core.actors.registry import in_family
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.checks import checked
from torchbeast.core.algos.config import StepConfig
from torchbeast.core.algos.optimiser_step import OptimiserStep, is_separable
from torchbeast.core.algos.ranks import Ranks
from torchbeast.core.ambient import own_settings, use_threads
from torchbeast.core.precision import dtype_for
from torchbeast.core.specs import ActorSpec
from torchbeast.core.storages.transition import Transitions
from torchbeast.learning.config import HardwareConfig
from torchbeast.learning.earlier_run import EarlierRun
from torchbeast.learning.hardware import Compute, choose, share_cores
from torchbeast.learning.weights import PublishedWeights, Publisher
from torchbeast.processes.memory import keep_freed_memory
from torchbeast.sources.config import ReplayConfig, RolloutConfig, TransitionsConfig

Weights = TypeVar("Weights", bound=Publisher)
MakeAgent = Callable[[ActorSpec], Agent]
"""Makes an agent with the network of a spec for the run's environment, or raises UsageError."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The settings of a learner."""

    actor: ActorSpec  # its name may be "auto": chosen by the observation space
    algo: type[Algorithm[Any]]
    algorithm: Any  # settings of the algorithm, of type algo.Config
    step: StepConfig
    total_steps: int
    rollouts: RolloutConfig
    hardware: HardwareConfig
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    transitions: TransitionsConfig = field(default_factory=TransitionsConfig)
    synchronous_rollouts: int = 0  # of single steps' source: collected at once, see online_rollouts
    reproducible: bool = False  # same results on all machines of one kind, see hardware.choose

    @property
    def spare_columns(self) -> int:
        """Number of replayed rollouts in a batch, beside the new ones."""
        return 0 if self.learns_from_transitions else self.replay.spare_columns(self.rollouts)

    @property
    def learns_from_transitions(self) -> bool:
        """Whether batches are single steps of a replay."""
        return issubclass(self.algo.takes, Transitions)

    @property
    def online_rollouts(self) -> RolloutConfig:
        """The batches of the online source. Those for a replay of single steps are one rollout,
        collected while the learner learns; or synchronous_rollouts between two updates.
        """
        if self.learns_from_transitions:
            return dataclasses.replace(self.rollouts, batch_size=self.synchronous_rollouts or 1)
        return self.rollouts


@dataclass(frozen=True, kw_only=True)
class Assembled(Generic[Weights]):
    """An assembled learner."""

    compute: Compute
    agent: Agent
    optimiser_step: OptimiserStep[Any]
    weights: Weights

    @property
    def algo(self) -> Algorithm[Any]:
        """The algorithm of the learner."""
        return self.optimiser_step.algo


def assemble(
    config: LearnerConfig,
    make_agent: MakeAgent,
    make_weights: Callable[[nn.Module, int], Weights],
    earlier: EarlierRun | None = None,
    say: Callable[[Compute, Agent], None] | None = None,
    ranks: Ranks | None = None,
    equalise: Callable[[OptimiserStep[Any]], None] | None = None,
) -> Assembled[Weights]:
    """Assembles a learner on this machine, and restores the state of an earlier run, if any.

    say: called once the network is on its device, before it is compiled or learns, to report
        hardware and agent.
    ranks: all learners that take every optimiser step together; None: this one alone.
    equalise: gives all of them the same state, before weights are published.

    Sets torch's number of threads, which affects initial weights too: call it before other threads
    use torch, and in another program's process within OwnProcess. Raises UsageError when the
    network does not suit the environment, the algorithm or the earlier run.
    """
    earlier = EarlierRun() if earlier is None else earlier
    compute = choose(config.hardware, config.reproducible)
    use_threads(compute.threads)
    agent = make_agent(in_family(earlier.actor(config.actor), config.algo.family))
    earlier.check_same_model(agent.spec)
    with own_settings():  # after the import of a user's network, which may set others
        agent.model.to(compute.device)
        feature_weights = agent.model.feature_weights()
        agent.model.compute_dtype = dtype_for(compute.precision, compute.device, feature_weights)
        algo = _algorithm(config, agent)
        if not is_separable(algo):
            compute = dataclasses.replace(compute, bytes_at_once=None, is_whole=True)
        if say is not None:
            say(compute, agent)
        if config.hardware.compile:
            agent.model.compile()  # the copies that act are not compiled
        step = _optimiser_step(algo, config, compute, agent, ranks)
        earlier.restore(step)
        if equalise is not None:
            equalise(step)
        weights = make_weights(agent.model, step.version)
    return Assembled(compute=compute, agent=agent, optimiser_step=step, weights=weights)


def assemble_alone(config: LearnerConfig, make_agent: MakeAgent) -> Assembled[PublishedWeights]:
    """Assembles a new learner whose weights are read by threads of this process, its own."""
    made = assemble(config, make_agent, PublishedWeights)
    keep_freed_memory(made.compute.device.type)
    return made


def _optimiser_step(
    algo: Algorithm[Any],
    config: LearnerConfig,
    compute: Compute,
    agent: Agent,
    ranks: Ranks | None,
) -> OptimiserStep[Any]:
    columns = config.rollouts.batch_size + config.spare_columns
    length = 1 if config.learns_from_transitions else config.rollouts.unroll_length
    threads = share_cores(compute, columns, length, agent)
    return OptimiserStep(
        algo,
        config.step,
        total_steps=config.total_steps,
        bytes_at_once=compute.bytes_at_once,
        num_threads=threads,
        ranks=ranks,
    )


def _algorithm(config: LearnerConfig, agent: Agent) -> Algorithm[Any]:
    """Makes the algorithm; raises UsageError where the network lacks what it needs.

    Other exceptions of the algorithm's own code keep their traceback.
    """
    config.algo.check_actor(agent.model, config.algorithm)
    specs_of_extras(agent.model, config.algo.needs)
    return checked(config.algo(agent.model, config.algorithm))
