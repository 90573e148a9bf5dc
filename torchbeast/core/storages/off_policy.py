# SPDX-License-Identifier: Apache-2.0
"""The storages of algorithms that learn from single steps of a replay.

They describe the TransitionReplay of the learner's process, which every rollout goes into and every
batch comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchbeast.core.algos.registry import replay_of
from torchbeast.core.checks import above, at_least, between, require
from torchbeast.core.factories import refuse_other_types, refuse_unknown
from torchbeast.core.storages.storage import Storage
from torchbeast.core.storages.transition import Transitions

if TYPE_CHECKING:
    from torchbeast.core.algos.base import Algorithm

Replay = TypeVar("Replay", bound="ReplayBuffer")


@dataclass(frozen=True, kw_only=True)
class ReplayBuffer(Storage):
    """Single steps, sampled many times each. What is None is the algorithm's own setting, which the
    programs have too (docs/off-policy.md).
    """

    holds = Transitions
    arguments: ClassVar[Mapping[str, str]] = {"replay_size": "size"}
    # Not as defaults of fields: those of the programs' flags are in TransitionsConfig alone.
    usual: ClassVar[Mapping[str, Any]] = {
        "n_step": 1,
        "priority_exponent": 0.0,
        "priority_beta": 0.4,
        "checkpoint_replay": False,
    }

    size: int | None
    """Steps that it holds, the newest."""
    batch_size: int | None
    """Steps that an update learns from."""
    replay_ratio: float | None
    """Replayed steps for each new one. inf: learner and workers never wait for each other."""
    learn_start: int | None
    """Steps in it from which on it is learnt from."""
    unroll_length: int | None
    """Steps of each environment that are collected at once."""
    n_step: int
    """Steps whose rewards are added up before a value is estimated, at most."""
    priority_exponent: float
    """Power of the size of its error in proportion to which a step is sampled; 0: uniformly."""
    priority_beta: float
    """How far losses are weighted to make up for priorities at first; grows to 1 over the run."""
    checkpoint_replay: bool
    """Save the contents with every checkpoint in log_dir; otherwise a restored run begins with an
    empty replay."""

    def __post_init__(self) -> None:
        at_least(1, size=self.size, batch_size=self.batch_size, n_step=self.n_step)
        at_least(1, unroll_length=self.unroll_length)
        at_least(0, learn_start=self.learn_start)
        above(0, replay_ratio=self.replay_ratio)
        exponents = {"priority_exponent": self.priority_exponent}
        between(0, 1, **exponents, priority_beta=self.priority_beta)

    @classmethod
    def create_factory(cls: type[Replay], **settings: Any) -> Replay:
        """Returns the storage; settings: its fields, by default as in `usual`, or None.

        Raises TypeError for an unknown name or another type, and ValueError for a value out of
        range.
        """
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        refuse_unknown(f"{cls.__name__}.create_factory", settings, types)
        given = {name: value for name, value in settings.items() if value is not None}
        refuse_other_types(given, types)
        return cls(**{**dict.fromkeys(types), **cls.usual, **settings})

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

    hindsight_share: float
    """Share of the steps that get such a goal."""

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0, 1, hindsight_share=self.hindsight_share)
        require(
            self.n_step == 1,
            f"{type(self).__name__} changes the goal of single steps, but n_step is {self.n_step}: "
            "leave it out, or use ReplayBuffer",
        )
