# SPDX-License-Identifier: Apache-2.0
"""The storages of algorithms that learn from rollouts: how long these are, and their returns.

A rollout travels from a source to an algorithm, whose `prepare` and `losses` compute returns and
advantages from it; the source owns its memory. So a storage is a description, and it holds nothing:
the number of rows, the number of rollouts in a batch, and what the algorithm has to compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchbeast.core.checks import at_least, between
from torchbeast.core.factories import names_checked
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.storages.storage import Storage, suitable_storage

if TYPE_CHECKING:
    from torchbeast.core.algos.base import Algorithm
    from torchbeast.core.algos.factory import AlgoFactory

Buffer = TypeVar("Buffer", bound="OnPolicyBuffer")


@dataclass(frozen=True, kw_only=True)
class OnPolicyBuffer(Storage):
    """Rollouts whose returns are whatever the algorithm computes."""

    holds = Rollout
    arguments: ClassVar[Mapping[str, str]] = {"unroll_length": "size"}

    size: int  # steps of one environment in a rollout
    batch_size: int | None  # rollouts in a batch; None: one of every environment
    replay: Mapping[str, Any]  # settings of a replay beside the rollouts, by names of flags

    def __post_init__(self) -> None:
        at_least(1, size=self.size, batch_size=self.batch_size)

    @classmethod
    @names_checked
    def create_factory(
        cls: type[Buffer], *, size: int = 1000, batch_size: int | None = None
    ) -> Buffer:
        """Returns the storage.

        size: steps of each environment between two updates.
        batch_size: rollouts in an update. Default: one of every environment that is collected
            from, so that an update learns from size * environments steps; with asynchronous
            collection one of every environment of one worker.
        """
        return cls(size=size, batch_size=batch_size, replay={})

    def flags(self, algo: type[Algorithm[Any]]) -> dict[str, Any]:
        return {"unroll_length": self.size, "batch_size": self.batch_size, **self.replay}


@dataclass(frozen=True, kw_only=True)
class OnPolicyGAEBuffer(OnPolicyBuffer):
    """Rollouts whose advantages are generalised advantage estimates, of algorithms like PPO."""

    gae_lambda: float

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0, 1, gae_lambda=self.gae_lambda)

    @classmethod
    @names_checked
    def create_factory(
        cls, *, size: int = 1000, batch_size: int | None = None, gae_lambda: float = 0.95
    ) -> OnPolicyGAEBuffer:
        """Returns the storage; size, batch_size: see OnPolicyBuffer.

        gae_lambda: decay of the errors that an advantage adds up.
        """
        return cls(size=size, batch_size=batch_size, replay={}, gae_lambda=gae_lambda)

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        algo = super().prepared(algo)
        if "gae_lambda" not in {field.name for field in dataclasses.fields(algo.config)}:
            raise NotImplementedError(
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

    @classmethod
    @names_checked
    def create_factory(
        cls,
        *,
        size: int = 1000,
        batch_size: int | None = None,
        replay_size: int = 0,
        replay_ratio: float = 1.0,
        learn_start: int = 0,
    ) -> OnPolicyVTraceBuffer:
        """Returns the storage; size, batch_size: see OnPolicyBuffer.

        replay_size: steps that a replay holds, for LASER; 0: none. replay_ratio: replayed rollouts
        for each new one in a batch. learn_start: steps in the replay from which on it is used.
        """
        replay = {
            "replay_size": replay_size,
            "replay_ratio": replay_ratio,
            "learn_start": learn_start,
        }
        return cls(size=size, batch_size=batch_size, replay=replay if replay_size else {})

    def prepared(self, algo: AlgoFactory) -> AlgoFactory:
        algo = super().prepared(algo)
        if not algo.algo.corrects_lag:
            raise NotImplementedError(
                f"{type(self).__name__} is for algorithms that learn from older policies too, but "
                f"{algo.algo.__name__} does not correct its returns for them: use "
                f"{suitable_storage(algo)}"
            )
        if self.replay and not algo.algo.learns_from_replay:
            raise NotImplementedError(
                f"{type(self).__name__} has a replay, but {algo.algo.__name__} does not learn from "
                "one: leave out replay_size, or use LASER"
            )
        return algo
