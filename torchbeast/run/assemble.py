# SPDX-License-Identifier: Apache-2.0
"""Assembles a learner: device, dtype, threads, network, algorithm and weights, in this order.

All programs, bench and benchmarks/ use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from torchbeast.collect.config import ReplayConfig, RolloutConfig, TransitionsConfig
from torchbeast.collect.contract import LearnerInfo, Publisher
from torchbeast.core.actors.contract import Actor, Agent, specs_of_extras
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.config import IMPALAConfig, StepConfig
from torchbeast.core.base.checks import counted
from torchbeast.core.base.computing import own_settings
from torchbeast.core.base.specs import ActorSpec, Precision
from torchbeast.core.envs.spaces import num_bytes
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.core.update.minibatch import WORTH_A_THREAD, columns_of_a_slice
from torchbeast.core.update.optimiser_step import OptimiserStep, is_separable
from torchbeast.core.update.ranks import Ranks
from torchbeast.errors import UsageError, as_usage_error
from torchbeast.fleets.system import available_cores
from torchbeast.run.config import HardwareConfig, resolved
from torchbeast.run.earlier_run import EarlierRun

MakeAgent = Callable[[ActorSpec], Agent]
"""Makes an agent whose network has this spec, for the run's environment; may raise UsageError."""

MakeWeights = Callable[[nn.Module, int], Publisher]
"""Makes the Publisher, which publishes the model's weights as this version."""

# Observations of 96 Atari rows. Measured with both Atari networks on two cores with 1 MiB of L2
# cache each: half of it has more overhead, and twice as much is slower with the deep network.
CPU_BYTES_AT_ONCE = 96 * 4 * 84 * 84


# Rows of a batch times weights. The most with which one thread was measured to be faster are 3e8.
_CHEAP = 5e8


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """The settings of a learner."""

    actor: ActorSpec  # its name may be "auto": the observation space decides
    algo: type[Algorithm[Any]]
    algorithm: Any  # settings of the algorithm, of type algo.Config
    step: StepConfig
    total_steps: int
    rollouts: RolloutConfig
    hardware: HardwareConfig
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    transitions: TransitionsConfig = field(default_factory=TransitionsConfig)
    synchronous_rollouts: int = 0  # for algorithms on single steps, see online_batch_size
    reproducible: bool = False  # same results on all machines of one kind, see choose

    @property
    def spare_columns(self) -> int:
        """Number of replayed rollouts in a batch, in addition to the new ones."""
        return 0 if self.learns_from_transitions else self.replay.spare_columns(self.rollouts)

    @property
    def learns_from_transitions(self) -> bool:
        """Whether batches are single steps of a replay."""
        return not issubclass(self.algo.takes, Rollout)

    @property
    def trains_on_any_age(self) -> bool:
        """Whether policy lag does not matter, because the batches of an algorithm for values come
        from a replay.
        """
        return self.learns_from_transitions or self.algo.burns_in

    @property
    def online_batch_size(self) -> int:
        """Rollouts in a batch of the online source. For a replay of single steps it is one rollout,
        collected during updates, or synchronous_rollouts of them, collected between updates.
        """
        if self.learns_from_transitions:
            return self.synchronous_rollouts or 1
        return self.rollouts.batch_size

    def in_environment(self, name: str) -> LearnerConfig:
        """Returns the settings with the environment's reward clipping in place of "auto"."""
        algorithm = self.algorithm
        clipping = resolved(getattr(algorithm, "reward_clipping", "auto"), name)
        if getattr(algorithm, "popart", False) and algorithm.reward_clipping == "auto":
            clipping = "none"  # PopArt is there to learn from rewards of any size
        if hasattr(algorithm, "reward_clipping"):
            with as_usage_error():  # of settings that do not fit this environment's clipping
                algorithm = replace(algorithm, reward_clipping=clipping)
        actor = replace(self.actor, reward_input=clipping)
        return replace(self, actor=actor, algorithm=algorithm)

    def after(self, recorded: Mapping[str, Any]) -> LearnerConfig:
        """Returns the settings with a decision where normalise_returns has none: that of the
        earlier run, because its checkpoint has the statistics of returns or lacks them.

        recorded: the earlier run's settings, by the names of flags; {} without one. Raises
        UsageError if popart is on and the earlier run was without it, or if rewards are clipped and
        the earlier run normalised returns.
        """
        algorithm = self.algorithm
        if recorded and getattr(algorithm, "popart", False) and not recorded.get("popart"):
            raise UsageError("popart cannot be added to a run: remove popart, or begin a new run")
        if not isinstance(algorithm, IMPALAConfig) or algorithm.normalise_returns is not None:
            return self
        found = recorded.get("normalise_returns", False if recorded else None)  # older runs lack it
        if found is None:
            found = algorithm.reward_clipping == "none" and algorithm.reward_scale == 1.0
            found = found and not algorithm.popart
        with as_usage_error():  # of a reward clipping that does not fit the earlier run's decision
            algorithm = replace(algorithm, normalise_returns=found)
        return replace(self, algorithm=algorithm)


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The chosen device, precision and threads."""

    device: torch.device
    precision: Precision  # of features
    threads: int  # number of CPU cores that the learner may use
    bytes_at_once: int | None  # bytes of observations in a slice; None: the whole batch
    is_whole: bool  # whether only one thread at a time may use the network for updates
    learner_threads: int  # threads that prepare batches and update

    def summary(self, model: Actor) -> str:
        """Returns a line for the start of a run."""
        where = str(self.device) if self.device.type == "cuda" else "CPU"
        dtype = str(model.compute_dtype).removeprefix("torch.")
        whole = ", whole batches" if where == "CPU" and self.bytes_at_once is None else ""
        return f"Device: {where}, {dtype}, {counted(self.threads, 'thread')}{whole}"


def choose(config: HardwareConfig, reproducible: bool = False) -> Compute:
    """Chooses, according to the hardware, what the Config does not specify.

    Raises UsageError for a GPU that does not exist.

    reproducible: choose the same on every machine, and make sums independent of the order in which
        threads finish.
    """
    device = _device(config)
    use_cuda, megabytes = device.type == "cuda", config.megabytes_at_once
    usual = None if use_cuda else CPU_BYTES_AT_ONCE
    is_exact = reproducible and config.precision == "auto"  # "auto": each device has its own
    return Compute(
        device=device,
        precision="float32" if is_exact else config.precision,
        threads=config.torch_threads or (1 if reproducible else available_cores()),
        bytes_at_once=usual if megabytes is None else int(megabytes * 1e6) or None,
        is_whole=use_cuda or config.compile or reproducible,
        learner_threads=config.num_learner_threads or (2 if use_cuda and not reproducible else 1),
    )


def share_cores(compute: Compute, columns: int, unroll_length: int, agent: Agent) -> int:
    """Returns the number of threads that compute gradients of slices, and sets torch's threads.

    columns: of a batch.

    The threads divide the cores among themselves: each uses an equal share inside torch's
    operations. There is only one thread on a GPU, if the batch is a single slice, in reproducible
    runs (which need a fixed order of sums), and with a compiled network. Call it before other
    threads use torch, because new threads inherit torch's setting.
    """
    size = columns, (unroll_length + 1) * num_bytes(agent.observation_space)
    at_once = columns_of_a_slice(agent.model, size, compute.bytes_at_once, compute.threads)
    over_slices = 1 if compute.is_whole else min(compute.threads, -(-columns // at_once))
    torch.set_num_threads(max(1, compute.threads // over_slices))
    return over_slices


def _device(config: HardwareConfig) -> torch.device:
    """Returns the device of a Config; raises UsageError for a GPU that does not exist."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.stays_on_cpu or (config.device == "auto" and not count):
        return torch.device("cpu")
    device = torch.device("cuda:0" if config.device in ("auto", "cuda") else config.device)
    if device.index >= count:
        other = f", or one below {count}" if count else ""
        raise UsageError(
            f"device {config.device} does not exist, PyTorch found {count} GPUs: use device "
            f"auto{other}"
        )
    return device


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """An assembled learner."""

    compute: Compute
    agent: Agent
    optimiser_step: OptimiserStep[Any]
    weights: Any  # the Publisher

    @property
    def algo(self) -> Algorithm[Any]:
        """The algorithm of the learner."""
        return self.optimiser_step.algo

    def learner_info(
        self, config: LearnerConfig, info_keywords: Sequence[str], seed: int, **others: Any
    ) -> LearnerInfo:
        """Returns what its source needs to know; others: further fields of LearnerInfo.

        info_keywords: of the environment. seed: of the environments.
        """
        at_once = 1  # because each batch is copied into the replay
        if not config.learns_from_transitions:
            at_once = self.compute.learner_threads + config.replay.is_used
        length = config.rollouts.unroll_length
        return LearnerInfo(
            rollouts=RolloutSpec(self.agent, self.algo.needs, length, info_keywords),
            batch_size=config.online_batch_size,
            weights=self.weights,
            device=self.compute.device,
            mode=self.algo.mode,
            precision=self.compute.precision,
            seed=seed,
            spare_columns=config.spare_columns,
            batches_at_once=at_once,
            **others,
        )


def assemble(
    config: LearnerConfig,
    make_agent: MakeAgent,
    make_weights: MakeWeights,
    earlier: EarlierRun | None = None,
    say: Callable[[Compute, Agent], None] | None = None,
    ranks: Ranks | None = None,
) -> Assembled:
    """Assembles a learner on this machine, and restores the state of an earlier run, if any.

    say: called to report hardware and agent, when the network is on its device and before it is
        compiled.
    ranks: all learners that take every optimiser step together; None: there is only this one.

    Sets torch's number of threads, which also affects initial weights. Call it before other threads
    use torch, and in the process of another program within OwnProcess. Raises UsageError if the
    network does not fit the environment, the algorithm or the earlier run.
    """
    earlier = EarlierRun() if earlier is None else earlier
    compute = choose(config.hardware, config.reproducible)
    torch.set_num_threads(compute.threads)
    agent = make_agent(earlier.actor(config.actor, config.algo))
    earlier.check_same_model(agent.spec)
    earlier.check_fits(agent)
    with own_settings():  # after importing a user's network, which may change settings
        agent.model.to(compute.device)
        agent.model.set_precision(compute.precision, compute.device)
        algo = _algorithm(config, agent, compute.device)
        if not is_separable(algo):
            compute = replace(compute, bytes_at_once=None, is_whole=True)
        if config.hardware.torch_threads is None and _is_small(config, agent):
            compute = replace(compute, threads=1)
        if say is not None:
            say(compute, agent)
        if config.hardware.compile:
            agent.model.compile()  # the copies that act are not compiled
        step = OptimiserStep(
            algo,
            config.step,
            total_steps=config.total_steps,
            bytes_at_once=compute.bytes_at_once,
            num_threads=share_cores(compute, *_columns_and_length(config), agent),
            ranks=ranks,
        )
        earlier.restore(step)
        weights = make_weights(agent.model, step.version)
    return Assembled(compute=compute, agent=agent, optimiser_step=step, weights=weights)


def _columns_and_length(config: LearnerConfig) -> tuple[int, int]:
    """Returns the number of columns of a batch, and the number of steps in each."""
    columns = config.rollouts.batch_size + config.spare_columns
    return columns, 1 if config.learns_from_transitions else config.rollouts.unroll_length


def _is_small(config: LearnerConfig, agent: Agent) -> bool:
    """Returns whether a batch is too small for a second thread.

    Threads that share the operations of a small batch spend their time on waiting for each other,
    and take cores from the actors. With one thread, presets for MinAtar, CartPole and Pendulum are
    1.1 to 1.9 times as fast on two cores.
    """
    columns, length = _columns_and_length(config)
    rows = columns * (length + 1)
    weights = sum(parameter.numel() for parameter in agent.model.parameters())
    is_cheap = rows * weights <= _CHEAP
    return is_cheap and rows * num_bytes(agent.observation_space) <= WORTH_A_THREAD


def _algorithm(config: LearnerConfig, agent: Agent, device: torch.device) -> Algorithm[Any]:
    """Makes the algorithm, with its models on the device.

    Raises UsageError if the network lacks an output that it needs. Other exceptions of the
    algorithm's code keep their traceback.
    """
    config.algo.check_actor(agent.model, config.algorithm)
    specs_of_extras(agent.model, config.algo.needs)
    algo = config.algo(agent.model, config.algorithm)
    algo.n_step = config.transitions.n_step
    for model in algo.models.values():  # an algorithm's author need not think of devices
        model.to(device)
    return algo
