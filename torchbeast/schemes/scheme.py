# SPDX-License-Identifier: Apache-2.0
"""A scheme: the components of an agent, and how the work on it is spread.

    collection   0 = in the learner's process, or M workers, each with vec_env_size environments;
                 synchronous: every batch is collected with the newest weights, from all workers
                 asynchronous: workers never wait, and a batch is whatever is ready first
    inference    worker: where the environments are; central: in the learner's process, for all
    gradients    0 = in the learner's process, or N workers, each of which collects as above
                 synchronous: all contribute to every step; asynchronous: a step for each
    update       centralised: the learner's process applies the gradients and sends the weights
                 decentralised: the workers join the gradients, and each applies them

Whatever does not go together is refused when a scheme is made, with both parts and what is missing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

import torch

from torchbeast.collect import config
from torchbeast.core.actors.contract import specs_of_extras
from torchbeast.core.actors.registry import ActorFactory
from torchbeast.core.algos.base import AlgoFactory
from torchbeast.core.algos.config import with_values
from torchbeast.core.base import checks
from torchbeast.core.envs.spaces import without_values
from torchbeast.core.envs.tasks import without_task
from torchbeast.core.envs.vec_env import VecEnvFactory
from torchbeast.core.storages.storage import Storage
from torchbeast.core.storages.transition import Transitions
from torchbeast.errors import IncompatibleParts, UsageError
from torchbeast.gradients.config import Communication, GradientConfig, UpdateExecution
from torchbeast.on_ray.config import RayConfig
from torchbeast.servers.config import FleetConfig

Inference = Literal["worker", "central"]
Backend = Literal["processes", "ray"]


_ENVS = "make_vec(...), or the first result of VecEnv.create_factory(...)"
_FACTORIES = {
    "algo_factory": (AlgoFactory, "PPO.create_factory(...)"),
    "actor_factory": (ActorFactory, "OnPolicyActorCritic.create_factory(...)"),
    "storage_factory": (Storage, "OnPolicyGAEBuffer.create_factory(...)"),
    "train_envs_factory": (VecEnvFactory, _ENVS),
    "test_envs_factory": (VecEnvFactory, _ENVS),
}

_AXES = {
    "col_communication": (Communication, "col_remote_workers"),
    "col_backend": (Backend, "col_remote_workers"),
    "inference": (Inference, "col_remote_workers"),
    "grad_communication": (Communication, "grad_remote_workers"),
    "grad_backend": (Backend, "grad_remote_workers"),
    "update_execution": (UpdateExecution, "grad_remote_workers"),
}
"""The values of each axis, and the number of workers that all but its default need."""

_MAPPINGS = {
    "col_worker_resources": ["num_cpus"],
    "grad_worker_resources": ["num_cpus", "num_gpus"],
    "sync_col_specs": ["fraction_workers", "fraction_samples"],
}

_REFUSED: list[tuple[Callable[[Scheme], object], str]] = [
    (
        lambda s: s.inference == "central" and s.is_synchronous,
        'inference="central" has workers that never wait for new weights, so they cannot collect '
        'synchronously: set col_communication="asynchronous" or inference="worker"',
    ),
    (
        lambda s: s.inference == "central" and s.col_backend == "ray",
        'inference="central" needs the environments on this machine, because every step is a round '
        'trip, but col_backend="ray" can place them on any node: set col_backend="processes" '
        'or inference="worker"',
    ),
    (
        lambda s: s.grad_remote_workers and (s.col_backend, s.grad_backend) == ("ray", "processes"),
        'col_backend="ray" requires gradient workers on Ray too, but grad_backend is "processes": '
        'set grad_backend="ray" or col_backend="processes"',
    ),
    (
        lambda s: s.grad_remote_workers and s.replay.is_used,
        "storage_factory has a replay, which is in the learner's process, out of reach of gradient "
        "workers: remove grad_remote_workers, or use a storage without replay",
    ),
    (
        lambda s: s.sync_col_specs and not s.grad_remote_workers,
        "sync_col_specs control when gradient workers stop collecting, but grad_remote_workers is "
        "0: remove sync_col_specs, or set grad_remote_workers to 1 or more",
    ),
    (
        lambda s: s.sync_col_specs and s.col_remote_workers,
        "sync_col_specs stop gradient workers that collect for themselves, but with "
        "col_remote_workers others collect for them: remove one of the two",
    ),
    (
        lambda s: [*s.sync_col_specs] == ["fraction_samples"],
        "fraction_samples of sync_col_specs is for workers that are stopped early, but without "
        "fraction_workers none is: add fraction_workers, such as 0.6",
    ),
    (
        lambda s: s.grad_communication != "synchronous" and getattr(s.algo.config, "popart", False),
        'popart normalises by the newest statistics, which workers with grad_communication="'
        'asynchronous" do not have: remove popart, or set grad_communication="synchronous"',
    ),
]
"""Combinations that do not work, each with its error message."""


@checks.suggesting
@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The components of an agent, and how the work of training it is divided among workers.

    Args:
        algo_factory: The algorithm, such as PPO.create_factory().
        actor_factory: The network, such as OnPolicyActorCritic.create_factory(obs_space,
            action_space). The algorithm decides what a built-in network has as outputs, so it
            accepts the factory of the other family too.
        storage_factory: The storage of experience, such as OnPolicyGAEBuffer.create_factory().
        train_envs_factory: The environments, from make_vec or VecEnv.create_factory.
        test_envs_factory: The environments of Learner.evaluate. None: train_envs_factory.
        col_remote_workers: Number of workers that collect. 0: the learner's process collects.
        col_communication: "synchronous": every batch is collected with the newest weights, from all
            workers. "asynchronous": workers never wait, and a batch is what is ready first.
        col_worker_resources: What Ray reserves for each worker, such as {"num_cpus": 1}.
        col_backend: The workers are "processes" of this machine, or actors of "ray".
        inference: Where actions are chosen: by each "worker", or "central" in the learner's
            process, in batches of many environments, which workers then only step.
        sync_col_specs: {"fraction_workers": 0.6, "fraction_samples": 0.25}: once 60 % of the
            gradient workers have their batch, the others stop, but not before they have 25 % of
            theirs.
        grad_remote_workers: Number of workers that compute gradients, each with its own collection.
            0: the learner's process computes them.
        grad_communication: "synchronous": all workers contribute to every step. "asynchronous": a
            step for each contribution.
        grad_worker_resources: What Ray reserves for each gradient worker, which uses that many
            cores, and a GPU if it gets one: {"num_cpus": 2, "num_gpus": 1}.
        grad_backend: The gradient workers are "processes" of this machine, or actors of "ray".
        update_execution: "centralised": the learner's process applies the gradients and sends the
            weights. "decentralised": the workers combine the gradients, and each applies them.
        local_device: "cpu", "cuda", or the number of a GPU as in "cuda:1". None: the first GPU if
            there is one.

    Raises:
        TypeError: For a component of another type.
        ValueError: For a value out of range.
        IncompatibleParts: A ValueError, for parts that do not work together.

    Example:
        ```python
        envs = make_vec("CartPole-v1", 8)
        scheme = Scheme(
            train_envs_factory=envs,
            algo_factory=PPO.create_factory(learning_rate=1e-3),
            actor_factory=OnPolicyActorCritic.create_factory(
                envs.observation_space, envs.action_space, "mlp"
            ),
            storage_factory=OnPolicyGAEBuffer.create_factory(size=128),
            col_remote_workers=2,
        )
        ```
    """

    algo_factory: AlgoFactory
    actor_factory: ActorFactory
    storage_factory: Storage
    train_envs_factory: VecEnvFactory
    test_envs_factory: VecEnvFactory | None = None
    col_remote_workers: int = 0
    col_communication: Communication = "synchronous"
    col_worker_resources: Mapping[str, float] = field(default_factory=dict)
    col_backend: Backend = "processes"
    inference: Inference = "worker"
    sync_col_specs: Mapping[str, float] = field(default_factory=dict)
    grad_remote_workers: int = 0
    grad_communication: Communication = "synchronous"
    grad_worker_resources: Mapping[str, float] = field(default_factory=dict)
    grad_backend: Backend = "processes"
    update_execution: UpdateExecution = "centralised"
    local_device: str | None = None

    def __post_init__(self) -> None:
        ours = str(self.update_execution).replace("ize", "ise")  # "centralized"
        object.__setattr__(self, "update_execution", ours)
        self._check_values()
        self._check_axes()
        self._check_components()

    @classmethod
    def preset(cls, name: str, train_envs_factory: VecEnvFactory, **others: Any) -> Scheme:
        """Returns a named architecture with default components.

        Args:
            name: One of a2c, ppo, a3c, dppo, dd-ppo, rapid, impala, seed, laser, r2d2, dqn, sac
                and ape-x.
            train_envs_factory: The environments, from make_vec or VecEnv.create_factory.
            **others: Arguments of Scheme, such as col_remote_workers, and hyperparameters of the
                algorithm, such as learning_rate. They replace the architecture's own.

        Raises:
            ValueError: For an unknown name, or parts that do not work together.
            TypeError: For an argument of another type, or hyperparameters and an algo_factory.

        Example:
            ```python
            Scheme.preset("impala", envs, learning_rate=5e-4, col_remote_workers=4)
            ```
        """
        from torchbeast.schemes.presets import SIZES, preset_of

        preset = preset_of(name)
        _check_factory("train_envs_factory", train_envs_factory)
        axes = [axis.name for axis in fields(cls)]
        if "algo_factory" in others and (more := [name for name in others if name not in axes]):
            raise TypeError(f"with an algo_factory, give {', '.join(more)} to its create_factory")
        for size in others.keys() & SIZES:
            raise TypeError(
                f"{size} is the size of the storage: pass storage_factory, for example "
                "OnPolicyGAEBuffer.create_factory(size=128)"
            )
        hyperparameters = inspect.signature(preset.algo.create_factory).parameters
        checks.refuse_unknown("Scheme.preset", others, [*axes, *hyperparameters])
        changed = {key: value for key, value in others.items() if key not in axes}
        chosen = {key: value for key, value in others.items() if key in axes}
        return cls(**{**preset.settings(train_envs_factory, changed), **chosen})

    @property
    def algo(self) -> AlgoFactory:
        """The algorithm, with the settings of the storage."""
        return self.storage_factory.prepared(self.algo_factory)

    @property
    def num_envs(self) -> int:
        """Number of environments of all workers."""
        return self.train_envs_factory.vec_env_size * max(1, self.col_remote_workers)

    @property
    def is_synchronous(self) -> bool:
        """Whether every batch is collected with the newest weights."""
        return self.col_communication == "synchronous"

    @property
    def learns_from_transitions(self) -> bool:
        """Whether batches are single steps of a replay."""
        return issubclass(self.storage_factory.holds, Transitions)

    @property
    def rollouts(self) -> config.RolloutConfig:
        """The batch of an update: of rollouts, or of single steps."""
        usual = self.num_envs if self.is_synchronous else self.train_envs_factory.vec_env_size
        flags = self._flags
        size = flags.get("batch_size", config.RolloutConfig.batch_size)
        size = usual if size is None else size
        return with_values(config.RolloutConfig(), {**flags, "batch_size": size}, check=True)

    @property
    def synchronous_rollouts(self) -> int:
        """Rollouts that are collected between updates from single steps; 0: meanwhile."""
        return self.num_envs if self.learns_from_transitions and self.is_synchronous else 0

    @property
    def replay(self) -> config.ReplayConfig:
        """The replay, if the storage has one."""
        return with_values(config.ReplayConfig(), self._flags, check=True)

    @property
    def transitions(self) -> config.TransitionsConfig:
        """How single steps are sampled."""
        return with_values(config.TransitionsConfig(), self._flags, check=True)

    @property
    def _flags(self) -> dict[str, Any]:
        return self.storage_factory.flags(self.algo_factory.algo)

    @property
    def fixed_lag(self) -> int | None:
        """The lag of every batch; None: it varies."""
        return 0 if self.is_synchronous else None

    @property
    def collecting(self) -> config.ActorsConfig:
        """The Config of the program that steps environments in the same way."""
        if self.inference == "central":
            return FleetConfig(num_envs=self.num_envs, num_servers=self.col_remote_workers)
        if not self.col_remote_workers:
            return config.ActorsConfig(num_envs=self.num_envs)
        return config.ProcessesConfig(
            num_envs=self.num_envs,
            num_workers=self.col_remote_workers,
            fixed_lag=self.fixed_lag,
            num_buffers=self.num_envs if self.is_synchronous else None,
        )

    @property
    def gradients(self) -> GradientConfig | None:
        """The workers that compute gradients; None: the learner's process does."""
        if not self.grad_remote_workers:
            return None
        return GradientConfig(
            num_workers=self.grad_remote_workers,
            communication=self.grad_communication,
            update_execution=self.update_execution,
            fraction_workers=self.sync_col_specs.get("fraction_workers", 1.0),
            fraction_samples=self.sync_col_specs.get("fraction_samples", 1.0),
            cores=max(1, int(self.grad_cpus)),
            gpus=self.grad_worker_resources.get("num_gpus", 0.0),
        )

    @property
    def grad_cpus(self) -> float:
        """CPUs that Ray reserves for a gradient worker."""
        return self.grad_worker_resources.get("num_cpus", 1.0)

    @property
    def ray(self) -> RayConfig:
        """The actors of Ray."""
        return RayConfig(
            num_envs=self.num_envs,
            num_workers=self.col_remote_workers,
            num_buffers=self.num_envs if self.is_synchronous else None,
            actor_cpus=self.col_worker_resources.get("num_cpus", 1.0),
        )

    def describe(self) -> str:
        """Returns the parts of the scheme, and which ones wait for others, as lines of text."""
        rollouts, replay, network = self.rollouts, self.replay, self.actor_factory.spec
        workers, learners = self.col_remote_workers, self.grad_remote_workers
        learning = _workers(learners, self.grad_backend)
        collecting = _workers(workers, self.col_backend) if workers else learning
        acting = learning if self.inference == "central" else collecting
        envs = checks.counted(self.train_envs_factory.vec_env_size, "environment")
        each = " each" if workers or learners else ""
        whose = " for every gradient worker" if workers and learners else ""
        newest = "before every batch" + ", for which all workers wait" * bool(workers)
        if workers and not self.is_synchronous:
            newest = "the newest at every step, without waiting"
        stops, gradients = "", self.gradients
        if gradients is not None and gradients.fraction_workers < 1:
            stops = f", until {gradients.fraction_workers:.0%} are ready"
        where = f"{collecting} with {envs}{each}{whose}"
        unit = f"rollouts of {rollouts.unroll_length} steps{each if learners else ''}"
        if self.learns_from_transitions:
            unit = "replayed steps"
        kept = f", replay of {replay.replay_size:,} steps" if replay.is_used else ""
        lines = [
            f"collection: in {where}, {self.col_communication}{stops}",
            f"actions: in {acting}",
            f"weights: {newest}",
            f"storage: {type(self.storage_factory).__name__}{kept}",
            f"algorithm: {self.algo_factory.algo.__name__}, network {network.name}",
            f"gradients: of {rollouts.batch_size} {unit}, in {learning}, {self.grad_communication}",
            f"update: {self.update_execution}",
        ]
        return "\n".join(lines)

    __repr__ = describe  # which a notebook shows

    def _check_values(self) -> None:
        for name in _FACTORIES:
            if (name, getattr(self, name)) != ("test_envs_factory", None):
                _check_factory(name, getattr(self, name))
        for name, (choices, number) in _AXES.items():
            checks.one_of(get_args(choices), **{name: getattr(self, name)})
            checks.at_least(0, **{number: getattr(self, number)})
        checks.check_device(local_device=self.local_device or "auto")
        for name, known in _MAPPINGS.items():
            checks.refuse_unknown(name, getattr(self, name), known)
        checks.above(0, **self.col_worker_resources)
        checks.above(0, **self.grad_worker_resources)

    def _check_axes(self) -> None:
        """Raises IncompatibleParts where the ways to spread the work do not go together."""
        for name, (_, number) in _AXES.items():
            chosen = getattr(self, name)
            if chosen != getattr(type(self), name) and not getattr(self, number):
                raise IncompatibleParts(
                    f'{name}="{chosen}" needs workers, but {number} is 0: set it to 1 or more'
                )
        for kind in ("col", "grad"):
            backend = getattr(self, f"{kind}_backend")
            if getattr(self, f"{kind}_worker_resources") and backend != "ray":
                raise IncompatibleParts(
                    f"{kind}_worker_resources are resources that Ray reserves for a worker, but "
                    f'{kind}_backend is "{backend}": remove them, or set {kind}_backend="ray"'
                )
        for is_refused, sentence in _REFUSED:
            if is_refused(self):
                raise IncompatibleParts(sentence)
        _ = self.gradients  # checks its values

    def _check_components(self) -> None:
        """Raises IncompatibleParts where the components do not go together."""
        self.storage_factory.prepared(self.algo_factory)
        self._check_replay()
        if self.col_remote_workers and self.is_synchronous:
            size = self.train_envs_factory.vec_env_size
            batch_size = self.synchronous_rollouts or self.rollouts.batch_size
            checks.require(
                batch_size % size == 0,
                f"batch_size {batch_size} must be a multiple of vec_env_size {size}, because "
                'col_communication="synchronous" takes whole rollouts of each worker',
            )
        self._check_spaces()
        self._check_actor()

    def _check_replay(self) -> None:
        if not self.learns_from_transitions:
            self.replay.spare_columns(self.rollouts)
            return
        rollouts = self.rollouts
        self.replay.updates_per_step(rollouts.batch_size, rollouts.unroll_length, None)
        try:
            if self.is_synchronous:
                self.replay.check_waits('col_communication="synchronous"')
            if self.transitions.hindsight_share:
                from torchbeast.core.storages.replay.transition_replay import check_goals

                envs = self.train_envs_factory
                check_goals(envs.observation_space, envs.frame_stack)
        except ValueError as error:
            name = type(self.storage_factory).__name__
            raise IncompatibleParts(f"{name} in this scheme: {error}") from error

    def _check_spaces(self) -> None:
        actor, envs = self.actor_factory, self.train_envs_factory
        for name in ("observation_space", "action_space"):
            space, space_of_envs = getattr(actor, name), getattr(envs, name)
            checks.require(
                space == space_of_envs,
                f"actor_factory was made for the {name} {space}, but train_envs_factory has "
                f"{space_of_envs}: pass the spaces from VecEnv.create_factory to create_factory",
            )
        test = self.test_envs_factory or envs
        ours, theirs = (without_values(without_task(e.observation_space)) for e in (envs, test))
        checks.require(
            (ours, envs.action_space) == (theirs, test.action_space),
            f"test_envs_factory has the spaces {test.observation_space} and {test.action_space}, "
            f"but train_envs_factory {envs.observation_space} and {envs.action_space}: one agent "
            "plays in both, so they must be equal",
        )

    def _check_actor(self) -> None:
        """Makes the actor once, without a trace in torch's random numbers, and checks it."""
        factory, name = self.algo_factory, self.actor_factory.owner
        try:
            with torch.random.fork_rng(devices=[]):
                actor = self.actor_factory.trained_by(factory.algo)("cpu")
            name = type(actor).__name__
            factory.algo.check_actor(actor, factory.config)
            specs_of_extras(actor, factory.algo.needs)
        except UsageError as error:
            raise IncompatibleParts(f"{name} with {factory.algo.__name__}: {error}") from error


def _check_factory(name: str, value: object) -> None:
    kind, how = _FACTORIES[name]
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {how}, got {value!r}")


def _workers(count: int, backend: str) -> str:
    """Returns the workers in words; without any, the process that does their work."""
    if not count:
        return "the learner's process"
    if backend == "ray":
        return checks.counted(count, "Ray actor")
    return f"{count} process{'es' * (count > 1)}"
