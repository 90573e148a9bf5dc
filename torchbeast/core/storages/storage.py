# SPDX-License-Identifier: Apache-2.0
"""What a Scheme asks of a storage: which batches it gives an algorithm, and with which settings.

A storage is a description and holds nothing; sources and replays own the memory.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torchbeast.core.algos.registry import replay_of
from torchbeast.core.base.checks import above, at_least, between, require, signed
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.storages.transition import Transitions
from torchbeast.errors import IncompatibleParts

if TYPE_CHECKING:
    from typing import Self

    from torchbeast.core.algos.base import AlgoFactory, Algorithm


@dataclass(frozen=True, kw_only=True)
class Storage(ABC):
    """The storage of a scheme."""

    holds: ClassVar[type]
    """The class of batches that algorithms get from it."""

    # Not as defaults of fields: those of the programs' flags are in TransitionsConfig alone.
    usual: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that are not given; others are None."""

    @signed(lambda storage: storage._settings())
    @classmethod
    def create_factory(cls, **settings: Any) -> Self:
        """Returns the `storage_factory` of a Scheme.

        Args:
            **settings: Fields of the storage, as the signature lists them. None: the algorithm's
                own setting, which the programs use too.

        Raises:
            TypeError: For an unknown name, or a value of another type.
            ValueError: For a value out of range.

        Example:
            OnPolicyGAEBuffer.create_factory(size=128, gae_lambda=0.95)
        """
        return cls(**{name: default for name, (_, default) in cls._settings().items()} | settings)

    @classmethod
    def _settings(cls) -> dict[str, tuple[Any, Any]]:
        """Returns the annotation and the default of every field."""
        fields = dataclasses.fields(cls)
        return {field.name: (field.type, cls.usual.get(field.name)) for field in fields}

    @abstractmethod
    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        """Returns the settings of rollouts and replay for an algorithm, by the names of flags;
        batch_size is None where the environments decide it.
        """

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        """Returns the algorithm with this storage's settings.

        Raises IncompatibleParts when the algorithm does not learn from what it holds.
        """
        taken = algo.algo.takes
        if not issubclass(self.holds, taken):
            raise IncompatibleParts(
                f"{type(self).__name__} yields {self.holds.__name__}, but {algo.algo.__name__} "
                f"trains on {taken.__name__}: use {suitable_storage(algo)}"
            )
        return algo


def suitable_storage(algo: AlgoFactory) -> str:
    """Returns the name of the storage that suits an algorithm."""
    if issubclass(algo.algo.takes, Transitions):
        return "ReplayBuffer"
    if algo.algo.corrects_lag:
        return "OnPolicyVTraceBuffer"
    fields = {field.name for field in dataclasses.fields(algo.config)}
    return "OnPolicyGAEBuffer" if "gae_lambda" in fields else "OnPolicyBuffer"


@dataclass(frozen=True, kw_only=True)
class OnPolicyBuffer(Storage):
    """Rollouts whose returns are whatever the algorithm computes."""

    holds = Rollout
    usual: ClassVar[Mapping[str, Any]] = {"size": 1000}

    size: int  # steps of each environment between two updates
    # Rollouts in an update. Default: one of every environment that is collected from, so that
    # an update learns from size * environments steps; with asynchronous collection one of
    # every environment of one worker.
    batch_size: int | None

    def __post_init__(self) -> None:
        at_least(1, size=self.size, batch_size=self.batch_size)

    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        return {"unroll_length": self.size, "batch_size": self.batch_size}


@dataclass(frozen=True, kw_only=True)
class OnPolicyGAEBuffer(OnPolicyBuffer):
    """Rollouts whose advantages are generalised advantage estimates, of algorithms like PPO."""

    usual: ClassVar[Mapping[str, Any]] = {**OnPolicyBuffer.usual, "gae_lambda": 0.95}

    gae_lambda: float  # decay of the errors that an advantage adds up

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0, 1, gae_lambda=self.gae_lambda)

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        algo = super().prepared(algo)
        if "gae_lambda" not in {field.name for field in dataclasses.fields(algo.config)}:
            raise IncompatibleParts(
                f"{type(self).__name__} is for algorithms that compute advantages by GAE, but "
                f"{algo.algo.__name__} has no gae_lambda: use {suitable_storage(algo)}"
            )
        if "gae_lambda" in algo.given and algo.config.gae_lambda != self.gae_lambda:
            raise ValueError(
                f"gae_lambda is {algo.config.gae_lambda:g} in {algo.algo.__name__} and "
                f"{self.gae_lambda:g} in {type(self).__name__}: give it once"
            )
        return algo.replaced(gae_lambda=self.gae_lambda)


@dataclass(frozen=True, kw_only=True)
class OnPolicyVTraceBuffer(OnPolicyBuffer):
    """Rollouts, of older policies too, whose returns V-trace corrects; of IMPALA and LASER."""

    usual: ClassVar[Mapping[str, Any]] = {
        **OnPolicyBuffer.usual,
        "replay_size": 0,
        "replay_ratio": 1.0,
        "learn_start": 0,
    }

    replay_size: int  # steps that a replay holds, for LASER; 0: none
    replay_ratio: float  # replayed rollouts for each new one in a batch
    learn_start: int  # steps in the replay from which on it is used

    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        names = ("replay_size", "replay_ratio", "learn_start") if self.replay_size else ()
        return super().flags(algo) | {name: getattr(self, name) for name in names}

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        algo = super().prepared(algo)
        if not algo.algo.corrects_lag:
            raise IncompatibleParts(
                f"{type(self).__name__} holds rollouts of older policies too, but "
                f"{algo.algo.__name__} does not correct for policy lag: use "
                f"{suitable_storage(algo)}"
            )
        if self.replay_size and not algo.algo.learns_from_replay:
            raise IncompatibleParts(
                f"{type(self).__name__} has a replay, but {algo.algo.__name__} does not use one: "
                "remove replay_size, or use LASER"
            )
        return algo


@dataclass(frozen=True, kw_only=True)
class ReplayBuffer(Storage):
    """Single steps, sampled many times each. What is None is the algorithm's own setting, which the
    programs have too (docs/how-to/off-policy.md).
    """

    holds = Transitions
    usual: ClassVar[Mapping[str, Any]] = {
        "n_step": 1,
        "priority_exponent": 0.0,
        "priority_beta": 0.4,
        "checkpoint_replay": False,
    }

    size: int | None  # steps that it holds, the newest
    batch_size: int | None  # steps that an update learns from
    # Replayed steps for each new one. inf: learner and workers never wait for each other.
    replay_ratio: float | None
    learn_start: int | None  # steps in it from which on it is learnt from
    unroll_length: int | None  # steps of each environment that are collected at once
    n_step: int  # steps whose rewards are added up before a value is estimated, at most
    # Power of the size of its error in proportion to which a step is sampled; 0: uniformly.
    priority_exponent: float
    # How far losses are weighted to make up for priorities at first; grows to 1 over the run.
    priority_beta: float
    # Save the contents with every checkpoint in log_dir; otherwise a restored run begins with
    # an empty replay.
    checkpoint_replay: bool

    def __post_init__(self) -> None:
        at_least(1, size=self.size, batch_size=self.batch_size, n_step=self.n_step)
        at_least(1, unroll_length=self.unroll_length)
        at_least(0, learn_start=self.learn_start)
        above(0, replay_ratio=self.replay_ratio)
        exponents = {"priority_exponent": self.priority_exponent}
        between(0, 1, **exponents, priority_beta=self.priority_beta)

    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        given["replay_size"] = given.pop("size")
        return replay_of(algo) | {name: v for name, v in given.items() if v is not None}


@dataclass(frozen=True, kw_only=True)
class HindsightExperienceReplayBuffer(ReplayBuffer):
    """Single steps of environments with goals, of which many are learnt from as if their goal had
    been one that was reached later in their episode (Andrychowicz et al. 2017, arXiv 1707.01495).
    """

    usual: ClassVar[Mapping[str, Any]] = {**ReplayBuffer.usual, "hindsight_share": 0.8}

    hindsight_share: float  # share of the steps that get such a goal

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0, 1, hindsight_share=self.hindsight_share)
        require(
            self.n_step == 1,
            f"{type(self).__name__} changes the goal of single steps, but n_step is {self.n_step}: "
            "leave it out, or use ReplayBuffer",
        )
