# SPDX-License-Identifier: Apache-2.0
"""The flags of the programs, in groups. The command line is derived from these classes.

Each field's docstring is its `--help` text: what it does, and what it costs. A combination that
cannot work raises ValueError when the flags are made, with a sentence that says what to change.
"""

from __future__ import annotations

import dataclasses
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from torchbeast.envs.options import EnvOptions
from torchbeast.envs.spec import EnvSpec

# Of torchbeast.core.precision, which imports torch; `--help` does not.
Precision = Literal["auto", "float32", "bfloat16"]

DEFAULT_ENV = "PongNoFrameskip-v4"
MAX_FIXED_LAG = 509  # two more versions of the weights are what shared memory has places for


def _require(holds: bool, sentence: str) -> None:
    if not holds:
        raise ValueError(sentence)


def _at_least(minimum: float, **values: float | None) -> None:
    for name, value in values.items():
        _require(
            value is None or value >= minimum,
            f"--{name} must be at least {minimum}, but is {value}",
        )


def _new_xpid() -> str:
    return f"torchbeast-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def available_cores() -> int:
    """The cores this process may run on, which a container or taskset may have made fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class EnvironmentFlags:
    """What is played."""

    env: str | None = None
    """An Atari name, Mock, Catch, any Gymnasium id, or package.module:factory for your own.
    Default: PongNoFrameskip-v4; with --mode test that of the run. --mode test in another one needs
    the same observations and actions."""

    observation_keys: tuple[str, ...] = ()
    """Leaves of a dict observation that the network sees, such as --observation_keys blstats
    inventory/glyphs; others are dropped where the environment runs. Default: all; with
    --mode test those of the run."""

    sticky_actions: float | None = None
    """Atari: chance, at each emulated frame, that a game does the action before again. Default:
    what the id promises, 0.25 for ALE/Pong-v5 and Pong-v0, 0 for PongNoFrameskip-v4; with --mode
    test that of the run."""
    frame_skip: int | None = None
    """Atari: emulated frames for each action. Default: 4; with --mode test that of the run."""
    full_action_space: bool = False
    """Atari: all 18 actions of the console in every game, not only those that it uses."""

    def __post_init__(self) -> None:
        _at_least(1, frame_skip=self.frame_skip)
        _require(
            self.sticky_actions is None or 0 <= self.sticky_actions < 1,
            f"--sticky_actions must be at least 0 and below 1, but is {self.sticky_actions}",
        )

    @property
    def env_id(self) -> str:
        """What is trained on."""
        return DEFAULT_ENV if self.env is None else self.env

    @property
    def spec(self) -> EnvSpec:
        """What is trained on, and how it is made."""
        return EnvSpec(self.env_id, options=self._options)

    @property
    def asked(self) -> EnvSpec:
        """What --mode test is told; the name is empty where that of the run is meant."""
        return EnvSpec(self.env or "", options=self._options)

    @property
    def _options(self) -> EnvOptions:
        return EnvOptions.of(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class ServedEnvironmentFlags:
    """What is played: the environment servers decide."""

    env: str | None = None
    """Refuse servers that serve another environment. Default: learn whatever they serve. With
    --mode test, which needs no servers: play this one. Default: that of the run."""
    num_actions: int | None = None
    """Size of the action set; needed only with servers of the original TorchBeast,
    which do not describe themselves."""

    def __post_init__(self) -> None:
        _at_least(1, num_actions=self.num_actions)


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """What is done, and where its files go."""

    mode: Literal["train", "test", "test_render"] = "train"
    """train; test: play whole episodes with the checkpoint of --xpid, or else of the latest run in
    --savedir; test_render: the same, and write a video."""
    xpid: str = field(default_factory=_new_xpid)
    """Name of the run. The name of an earlier run resumes it with the settings that it recorded;
    flags that are given here win. Default: made from the time."""
    savedir: str = "~/logs/torchbeast"
    """The run's files lie in {savedir}/{xpid}."""
    disable_checkpoint: bool = False
    """Write no model.tar: the run can be neither resumed nor tested."""
    checkpoint_interval: float = 600.0
    """Seconds between checkpoints; one is also written at the end, on Ctrl-C and on SIGTERM."""
    num_episodes: int = 10
    """Whole episodes that --mode test plays."""
    sampled: bool = False
    """--mode test plays with actions sampled as in training, not with the most likely ones."""
    random_start: int | None = None
    """--mode test begins each episode with 0 to this many random actions: the most likely ones
    play a deterministic game the same way every time. Default: 30 in Atari games, else 0."""
    preset: str | None = None
    """Settings that belong together take the place of the defaults below and above;
    help lists them."""
    seed: int | None = None
    """Seed of the whole run: weights, actions, every environment.
    Default: random, recorded in meta.json."""

    def __post_init__(self) -> None:
        _at_least(1, num_episodes=self.num_episodes, checkpoint_interval=self.checkpoint_interval)
        _at_least(0, seed=self.seed, random_start=self.random_start)
        _require(
            self.xpid not in ("", ".", "..", "latest") and "/" not in self.xpid,
            f"--xpid must be a plain name of a folder other than 'latest', but is {self.xpid!r}",
        )
        _require(
            not (self.disable_checkpoint and self.mode != "train"),
            f"--mode {self.mode} reads a checkpoint; leave out --disable_checkpoint",
        )
        _require(
            not (self.sampled and self.mode == "train"),
            "--sampled is for --mode test; training always samples",
        )
        _require(
            self.random_start is None or self.mode != "train",
            "--random_start is for --mode test; episodes of training differ by themselves",
        )

    @property
    def folder(self) -> Path:
        """{savedir}/{xpid}"""
        return Path(self.savedir).expanduser().absolute() / self.xpid


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """The network."""

    model: str = "auto"
    """deep (IMPALA ResNet), shallow (the original's AtariNet, 3x faster), shallow-norm (AtariNet
    with standardised images and an orthogonal start: learns Pong in fewer steps), small (one
    convolution), mlp, my_module:MyNet; auto: deep for images, in MonoBeast shallow, as in the
    original programs; small for images below 36 pixels and maps of names, mlp for vectors.
    docs/observations.md says what is an image."""
    use_lstm: bool = False
    """Give the network a recurrent memory. Costs speed;
    needed where one observation does not tell the state."""


@dataclass(frozen=True, kw_only=True)
class LearningFlags:
    """What is learnt from how much. A step is one agent step of one environment (four Atari
    frames)."""

    total_steps: int = 100_000
    """Environment steps to learn from; the learning rate reaches 0 there."""
    batch_size: int = 8
    """Rollouts in one update."""
    unroll_length: int = 80
    """Steps in one rollout. Longer: fewer, larger updates and older data."""
    discounting: float = 0.99
    """Discount of a reward one step later."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this in the loss (never in the logs), before they are clipped.
    Returns of about one are learnt best."""
    reward_clipping: Literal["auto", "abs_one", "none"] = "auto"
    """abs_one: rewards are clamped to [-1, 1] in the loss (never in the logs). none: they are
    learnt from as they are. The network sees them clamped too, or else as sign(r) log(1 + |r|).
    auto: abs_one for Atari games, none elsewhere; abs_one also with servers of the original
    TorchBeast, which do not say what they serve."""
    entropy_cost: float = 0.0006
    """Weight of the entropy bonus: more keeps exploring longer."""
    baseline_cost: float = 0.5
    """Weight of the value loss."""

    def __post_init__(self) -> None:
        _at_least(1, total_steps=self.total_steps, batch_size=self.batch_size)
        _at_least(1, unroll_length=self.unroll_length)
        _at_least(0, entropy_cost=self.entropy_cost, baseline_cost=self.baseline_cost)
        _require(
            self.reward_scale > 0,
            f"--reward_scale must be greater than 0, but is {self.reward_scale}",
        )
        _require(
            0 <= self.discounting <= 1,
            f"--discounting must be between 0 and 1, but is {self.discounting}",
        )


@dataclass(frozen=True, kw_only=True)
class OptimiserFlags:
    """RMSprop, PyTorch's (epsilon is added outside the root)."""

    learning_rate: float = 0.00048
    """It falls linearly from this to 0 at --total_steps."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows from 0 at first. RMSprop's average starts at 0: with
    a small --epsilon the first updates are up to ten times as large as later ones, and can
    silence a network for good."""
    alpha: float = 0.99
    """Smoothing of the squared gradient."""
    momentum: float = 0.0
    """Momentum."""
    epsilon: float = 0.01
    """Added to the root of the squared gradient."""
    grad_norm_clipping: float = 40.0
    """Largest norm of a gradient."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon", "grad_norm_clipping"):
            value = getattr(self, name)
            _require(value > 0, f"--{name} must be greater than 0, but is {value}")
        _at_least(0, alpha=self.alpha, momentum=self.momentum, warmup_steps=self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class MachineFlags:
    """How the learner uses this machine."""

    num_learner_threads: Annotated[int | None, tyro.conf.arg(aliases=("--num_threads",))] = None
    """Threads that prepare and learn batches, one update at a time.
    Default: 2 with a GPU (one copies while one learns), else 1."""
    torch_threads: int | None = None
    """Threads that an update computes with on the CPU: each learns pieces of the batch, which are
    added up in no certain order. Default: the cores this process may use; with --fixed_lag 1,
    and more are inside of operations, because another number adds up in another order."""
    precision: Precision = "auto"
    """What features are computed in; everything else is float32. auto: bfloat16 where the hardware
    multiplies it (AMX, AVX512-BF16, tensor cores), else float32; with --fixed_lag float32."""
    megabytes_at_once: float | None = None
    """Observations (MB) whose gradients are computed at once; 0: all. Less fits the cache, more
    has less overhead; what is learnt is the same. Default: 2.7 on the CPU, all on a GPU."""
    compile: bool = False
    """Compile the network for learning with torch.compile: a minute and more at the start, and a
    C++ compiler. It gained nothing on the CPU it was measured on."""
    disable_cuda: bool = False
    """Use the CPU although there is a GPU."""
    write_profiler_trace: bool = False
    """Write trace.json (chrome://tracing) of some updates to the run's folder, as one thread sees
    them. Slows those updates."""

    def __post_init__(self) -> None:
        _at_least(1, num_learner_threads=self.num_learner_threads)
        _at_least(1, torch_threads=self.torch_threads)
        _at_least(0, megabytes_at_once=self.megabytes_at_once)


@dataclass(frozen=True, kw_only=True)
class PipelineFlags:
    """What lies between the environment servers and the learner."""

    num_inference_threads: int | None = None
    """Threads that choose actions, each with its own copy of the network.
    Default: 2 with a GPU, else one for every four cores, at least one; one where the operations
    of one use all cores (see --torch_threads)."""
    max_learner_queue_size: int | None = None
    """Rollouts that may wait for the learner; more: older data. Default: two batches."""

    def __post_init__(self) -> None:
        _at_least(1, num_inference_threads=self.num_inference_threads)
        _at_least(1, max_learner_queue_size=self.max_learner_queue_size)


@dataclass(frozen=True, kw_only=True)
class FleetFlags:
    """Environments and the processes that serve them."""

    num_actors: int = 4
    """Environments in all. Each costs memory; more make larger inference batches."""
    num_servers: int | None = None
    """Server processes that they are spread over.
    Default: one a core, at most one an environment."""
    pipes_basename: str | None = None
    """Server i listens at {pipes_basename}.{i}, e.g. unix:/tmp/polybeast.
    Default: sockets in a folder of this run."""

    def __post_init__(self) -> None:
        _at_least(1, num_actors=self.num_actors, num_servers=self.num_servers)
        _require(
            self.num_servers is None or self.num_servers <= self.num_actors,
            f"--num_servers {self.num_servers} leaves servers without an environment: "
            f"give at most as many as --num_actors {self.num_actors}",
        )

    def servers(self) -> int:
        """How many server processes."""
        return self.num_servers or min(self.num_actors, available_cores())


@dataclass(frozen=True, kw_only=True)
class ServedFleetFlags:
    """The environment servers to learn from, which run already."""

    num_actors: int | None = None
    """Environments to find: servers {pipes_basename}.0, .1, ... are asked until exactly this many
    are found. Default: those of all servers there."""
    pipes_basename: str | None = None
    """Where the servers listen. Default: the folder of this user where polybeast_env listens by
    default."""
    connect_timeout: float = 20.0
    """Seconds to wait for each server to answer at the start."""

    def __post_init__(self) -> None:
        _at_least(1, num_actors=self.num_actors)
        _require(
            self.connect_timeout > 0,
            f"--connect_timeout must be greater than 0, but is {self.connect_timeout}",
        )


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """Environment servers for a learner in another terminal or on another machine."""

    num_servers: int = 4
    """Server processes. About one a core is best."""
    num_actors: int | None = None
    """Environments in all, spread over the servers. Default: one a server."""
    pipes_basename: str | None = None
    """Server i listens at {pipes_basename}.{i}. Default: sockets in a folder of this user."""

    def __post_init__(self) -> None:
        _at_least(1, num_servers=self.num_servers)
        _require(
            self.num_actors is None or self.num_actors >= self.num_servers,
            f"--num_actors {self.num_actors} leaves servers without an environment: "
            f"give at least as many as --num_servers {self.num_servers}",
        )


@dataclass(frozen=True, kw_only=True)
class LearnerGroups:
    """The groups that every learner has."""

    run: RunFlags = field(default_factory=RunFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    learning: LearningFlags = field(default_factory=LearningFlags)
    optimiser: OptimiserFlags = field(default_factory=OptimiserFlags)
    machine: MachineFlags = field(default_factory=MachineFlags)

    def torch_threads(self) -> int:
        """With how many threads the learner computes on the CPU."""
        return self.machine.torch_threads or available_cores()

    def adds_in_order(self) -> bool:
        """Whether sums may not depend on which thread is first."""
        return False

    def precision(self) -> Precision:
        """What features are computed in."""
        return self.machine.precision


@dataclass(frozen=True, kw_only=True)
class ServedLearnerGroups(LearnerGroups):
    """The groups of a learner that has environment servers."""

    pipeline: PipelineFlags = field(default_factory=PipelineFlags)

    def __post_init__(self) -> None:
        size = self.pipeline.max_learner_queue_size
        _require(
            size is None or size >= self.learning.batch_size,
            f"--max_learner_queue_size {size} can never hold a batch: "
            f"give at least --batch_size {self.learning.batch_size}",
        )


@dataclass(frozen=True, kw_only=True)
class PolyBeastFlags(ServedLearnerGroups):
    """Trains an IMPALA agent: starts the environment servers and learns from them."""

    environment: EnvironmentFlags = field(default_factory=EnvironmentFlags)
    fleet: FleetFlags = field(default_factory=FleetFlags)


@dataclass(frozen=True, kw_only=True)
class PolyBeastLearnerFlags(ServedLearnerGroups):
    """Trains an IMPALA agent from environment servers that run already (polybeast_env)."""

    environment: ServedEnvironmentFlags = field(default_factory=ServedEnvironmentFlags)
    fleet: ServedFleetFlags = field(default_factory=ServedFleetFlags)


@dataclass(frozen=True, kw_only=True)
class PolyBeastEnvFlags:
    """Serves environments to a learner (polybeast_learner) until Ctrl-C."""

    environment: EnvironmentFlags = field(default_factory=EnvironmentFlags)
    servers: ServerFlags = field(default_factory=ServerFlags)


@dataclass(frozen=True, kw_only=True)
class ActorFlags:
    """Environments and the processes that act in them."""

    num_actors: int = 4
    """Environments in all. Each costs memory; more make larger inference batches."""
    num_processes: int | None = None
    """Actor processes that they are spread over, each with a copy of the network.
    Default: one a core, at most one an environment; with --fixed_lag 2, else 1, on every
    machine."""
    num_buffers: int | None = None
    """Rollouts of one environment that are written or wait for the learner, at least one for each
    of --num_actors; more: older data (at most about --num_buffers / --batch_size updates old).
    Default: two for each environment."""
    fixed_lag: int | None = None
    """Learn from rollouts that were acted with weights exactly this many updates old, in a fixed
    order: the same curve on every machine. Costs speed. Default: whatever is ready."""

    def __post_init__(self) -> None:
        _at_least(1, num_actors=self.num_actors, num_processes=self.num_processes)
        _at_least(0, fixed_lag=self.fixed_lag)
        _require(
            self.fixed_lag is None or self.fixed_lag <= MAX_FIXED_LAG,
            f"--fixed_lag must be at most {MAX_FIXED_LAG}, but is {self.fixed_lag}",
        )
        _require(
            self.num_processes is None or self.num_processes <= self.num_actors,
            f"--num_processes {self.num_processes} leaves processes without an environment: "
            f"give at most as many as --num_actors {self.num_actors}",
        )
        _require(
            self.num_buffers is None or self.num_buffers >= self.num_actors,
            f"--num_buffers {self.num_buffers} leaves environments without a buffer: "
            f"give at least --num_actors {self.num_actors}",
        )

    def processes(self) -> int:
        """How many actor processes."""
        if self.num_processes is not None:
            return self.num_processes
        if self.fixed_lag is not None:
            return 2 if self.num_actors % 2 == 0 else 1
        return min(self.num_actors, available_cores())

    def buffers(self) -> int:
        """How many rollouts of one environment are written or wait."""
        return self.num_buffers or 2 * self.num_actors


@dataclass(frozen=True, kw_only=True)
class MonoBeastFlags(LearnerGroups):
    """Trains an IMPALA agent on this machine; needs nothing that is compiled."""

    environment: EnvironmentFlags = field(default_factory=EnvironmentFlags)
    actors: ActorFlags = field(default_factory=ActorFlags)

    def __post_init__(self) -> None:
        if self.actors.fixed_lag is not None:
            self._check_fixed_lag()

    def torch_threads(self) -> int:
        """With a fixed lag the same on every machine."""
        fixed = self.actors.fixed_lag is not None and self.machine.torch_threads is None
        return 1 if fixed else super().torch_threads()

    def adds_in_order(self) -> bool:
        """With a fixed lag a run can be repeated."""
        return self.actors.fixed_lag is not None

    def precision(self) -> Precision:
        """With a fixed lag the same on every machine."""
        fixed = self.actors.fixed_lag is not None and self.machine.precision == "auto"
        return "float32" if fixed else super().precision()

    def _check_fixed_lag(self) -> None:
        each, rest = divmod(self.actors.num_actors, self.actors.processes())
        _require(
            not rest and self.learning.batch_size % each == 0,
            f"with --fixed_lag, --num_actors {self.actors.num_actors} must be the same for each of "
            f"--num_processes {self.actors.processes()}, and --batch_size "
            f"{self.learning.batch_size} a multiple of each one's share",
        )
        threads = self.machine.num_learner_threads
        _require(
            threads in (None, 1),
            f"with --fixed_lag one thread learns: leave out --num_learner_threads {threads}",
        )
