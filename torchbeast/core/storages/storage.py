# SPDX-License-Identifier: Apache-2.0
"""What a Scheme asks of a storage: which batches it gives an algorithm, and with which settings.

A storage is a description and holds nothing; sources and replays own the memory. The Scheme makes
the programs' Configs of its values, which check them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from torchbeast.core.algos.config import DQNConfig, usual_of
from torchbeast.core.base.checks import signed
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.storages.transition import Transitions
from torchbeast.errors import IncompatibleParts

if TYPE_CHECKING:
    from typing import Self

    from torchbeast.core.algos.base import AlgoFactory, Algorithm


@dataclass(frozen=True, kw_only=True)
class Storage(ABC):
    """Base class of a scheme's storages, which describe the batches that algorithms get.

    Attributes:
        holds: The class of the batches.
        for_burn_in: Whether they have rollouts that are replayed by priority, for R2D2.
    """

    holds: ClassVar[type]
    for_burn_in: ClassVar[bool] = False

    @signed(lambda storage: {f.name: (f.type, f.default) for f in fields(storage)})
    @classmethod
    def create_factory(cls, **settings: Any) -> Self:
        """Returns the `storage_factory` of a Scheme.

        Args:
            **settings: Fields of the storage; the signature lists them with their defaults. None:
                the algorithm's own setting, which the programs use too.

        Raises:
            TypeError: For an unknown name.

        Example:
            ```python
            OnPolicyGAEBuffer.create_factory(size=128, gae_lambda=0.95)
            ```
        """
        return cls(**settings)

    @abstractmethod
    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        """Returns the settings of rollouts and replay for an algorithm, by the names of flags;
        batch_size is None where the environments decide it.
        """

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        """Returns the algorithm with this storage's settings.

        Raises:
            IncompatibleParts: If the algorithm does not train on the storage's batches.
        """
        taken = algo.algo.takes
        if not issubclass(self.holds, taken):
            raise self._unfit(algo, f"yields {self.holds.__name__}", f"trains on {taken.__name__}")
        if algo.algo.burns_in != self.for_burn_in:
            does = {True: "replays rollouts by priority", False: "does not replay by priority"}
            raise self._unfit(algo, does[self.for_burn_in], does[algo.algo.burns_in])
        return algo

    def _unfit(self, algo: AlgoFactory, ours: str, theirs: str) -> IncompatibleParts:
        """Returns the error that says what storage and algorithm do, and which storage to use."""
        return IncompatibleParts(
            f"{type(self).__name__} {ours}, but {algo.algo.__name__} {theirs}: use "
            f"{suitable_storage(algo)}"
        )


def suitable_storage(algo: AlgoFactory) -> str:
    """Returns the name of the storage that suits an algorithm."""
    if issubclass(algo.algo.takes, Transitions):
        return "ReplayBuffer"
    if algo.algo.burns_in:
        return "RolloutReplayBuffer"
    if algo.algo.corrects_lag:
        return "OnPolicyVTraceBuffer"
    return "OnPolicyGAEBuffer" if hasattr(algo.config, "gae_lambda") else "OnPolicyBuffer"


@dataclass(frozen=True, kw_only=True)
class OnPolicyBuffer(Storage):
    """Rollouts, for algorithms that compute returns themselves.

    Args:
        size: Steps of each environment between two updates.
        batch_size: Rollouts of an update. Default: one of every environment, so that an update
            trains on size * environments steps; with asynchronous collection one of every
            environment of one worker.
    """

    holds = Rollout

    size: int = 1000
    batch_size: int | None = None

    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        return {"unroll_length": self.size, "batch_size": self.batch_size}


@dataclass(frozen=True, kw_only=True)
class OnPolicyGAEBuffer(OnPolicyBuffer):
    """Rollouts with generalised advantage estimates (GAE), for algorithms like PPO.

    Args:
        size: Steps of each environment between two updates.
        batch_size: Rollouts of an update; see OnPolicyBuffer.
        gae_lambda: Lambda of GAE: 0 is the one-step TD error, 1 the Monte Carlo return minus the
            value.
    """

    gae_lambda: float = 0.95

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        algo = super().prepared(algo)
        if not hasattr(algo.config, "gae_lambda"):
            ours = "is for algorithms that compute advantages by GAE"
            raise self._unfit(algo, ours, "has no gae_lambda")
        if "gae_lambda" in algo.given and algo.config.gae_lambda != self.gae_lambda:
            raise ValueError(
                f"gae_lambda is {algo.config.gae_lambda:g} in {algo.algo.__name__} and "
                f"{self.gae_lambda:g} in {type(self).__name__}: set it once"
            )
        return algo.replaced(gae_lambda=self.gae_lambda)


@dataclass(frozen=True, kw_only=True)
class OnPolicyVTraceBuffer(OnPolicyBuffer):
    """Rollouts whose policy lag V-trace corrects, for IMPALA and LASER.

    Args:
        size: Steps of each environment in a rollout.
        batch_size: Rollouts of an update; see OnPolicyBuffer.
        replay_size: Environment steps that a replay holds, for LASER. 0: no replay.
        replay_ratio: Replayed rollouts for each new one in a batch.
        learn_start: Environment steps in the replay before it is used.
    """

    replay_size: int = 0
    replay_ratio: float = 1.0
    learn_start: int = 0

    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        names = ("replay_size", "replay_ratio", "learn_start")
        return super().flags(algo) | {name: getattr(self, name) for name in names}

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        algo = super().prepared(algo)
        if not algo.algo.corrects_lag:
            ours = "has rollouts from older policies too"
            raise self._unfit(algo, ours, "does not correct for policy lag")
        if self.replay_size and not algo.algo.learns_from_replay:
            raise IncompatibleParts(
                f"{type(self).__name__} has a replay, but {algo.algo.__name__} does not use one: "
                "remove replay_size, or use LASER"
            )
        return algo


@dataclass(frozen=True, kw_only=True)
class ReplayBuffer(Storage):
    """Experience replay of single steps, uniform or prioritised, for DQN, SAC and TD3.

    Settings that are None use the algorithm's defaults.

    Args:
        size: Environment steps that it holds, the newest.
        batch_size: Transitions of an update.
        replay_ratio: Replayed steps for each new one. inf: collection and updates never wait for
            each other.
        learn_start: Environment steps to collect before the first update.
        unroll_length: Steps of each environment that are collected together.
        n_step: Steps whose rewards are added up before the value is bootstrapped, at most.
        priority_exponent: Prioritisation exponent alpha (Schaul et al. 2016); 0 samples uniformly.
        priority_beta: Initial importance-sampling exponent beta, which grows to 1 over the run.
        checkpoint_replay: Whether to save the contents with every checkpoint in log_dir. Otherwise
            a resumed run starts with an empty replay.
    """

    holds: ClassVar[type] = Transitions

    size: int | None = None
    batch_size: int | None = None
    replay_ratio: float | None = None
    learn_start: int | None = None
    unroll_length: int | None = None
    n_step: int | None = None
    priority_exponent: float = 0.0
    priority_beta: float = 0.4
    checkpoint_replay: bool = False

    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        given["replay_size"] = given.pop("size")
        usual = usual_of(algo.Config)
        of_replay = usual if "replay_size" in usual else dict(DQNConfig.usual)
        return of_replay | {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class RolloutReplayBuffer(ReplayBuffer):
    """New rollouts, and a prioritised replay of them, for R2D2.

    Args:
        size: See ReplayBuffer, and so for the other arguments, but batch_size counts new rollouts
            and replay_ratio replayed ones for each.
    """

    holds = Rollout
    for_burn_in = True

    priority_exponent: float = 0.9
    priority_beta: float = 0.6


@dataclass(frozen=True, kw_only=True)
class HindsightExperienceReplayBuffer(ReplayBuffer):
    """Hindsight experience replay (Andrychowicz et al. 2017, arXiv 1707.01495) of single steps, for
    environments with goals.

    A share of the sampled steps gets another goal: one that was reached later in the episode.

    Args:
        hindsight_share: Share of the sampled steps that get such a goal.
        size: See ReplayBuffer, and so for the other arguments; n_step must be 1.
    """

    n_step: int | None = 1
    hindsight_share: float = 0.8
