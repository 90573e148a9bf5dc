# SPDX-License-Identifier: Apache-2.0
"""What a learner and its source promise each other; tests/support/compliance/ checks sources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchbeast.collect.config import RolloutConfig
    from torchbeast.collect.lost_streams import LostStream
    from torchbeast.core.actors.contract import Agent, Mode
    from torchbeast.core.base.specs import Precision
    from torchbeast.fleets.supervisor import Supervisor

ACTOR_STAGES = ("environment", "inference", "queueing")
"""Stages of collecting: stepping, choosing actions, waiting for room for a rollout."""


class Source(Protocol):
    """Yields the batches that a learner trains on."""

    @property
    def yields(self) -> type:
        """The class of its batches."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory of the source and its batches on the learner's machine, once all of it
        is in use.
        """

    def start(self, supervisor: Supervisor) -> None:
        """Starts collecting, in threads that the supervisor runs."""

    def batches(self) -> Iterator[Any]:
        """Yields batches until the source is closed; each learner thread has its own iterator."""

    def close(self) -> None:
        """Wakes every thread that waits here; may be called again."""

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Gives every environment options for its next resets, and later workers' environments too.

        Raises UsageError if this source cannot pass them on. If an environment refuses them, the
        run fails.
        """

    def status(self) -> Mapping[str, float]:
        """Returns queue lengths and counts, by the names of log columns."""

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that all workers have spent since the start, by ACTOR_STAGES."""

    def hanging(self) -> str:
        """Describes workers that have been in one stage for over WAIT_S, or returns ""."""

    def lost_streams(self) -> list[LostStream]:
        """Returns the streams that were lost and have not reconnected."""


class Publisher(Protocol):
    """Receives the learner's weights after each update."""

    def publish(self, model: nn.Module, version: int) -> None:
        """Publishes the model's current weights as this version."""


Published = TypeVar("Published", bound=Publisher)


@dataclass(frozen=True, kw_only=True)
class LearnerInfo(Generic[Published]):
    """The facts about a learner that its source needs to know."""

    agent: Agent
    weights: Published
    device: torch.device  # batches for a GPU are in pinned memory
    extras: tuple[str, ...]  # names of the outputs of acting that the algorithm needs
    mode: Mode  # in which actions are chosen
    precision: Precision  # of the actor's features on the CPU
    rollouts: RolloutConfig  # the batches of the source
    seed: int  # of the environments; differs after each resumption
    spare_columns: int  # of a batch, after the new rollouts: for replayed ones
    batches_at_once: int  # that the learner holds, at most: taken and not yet returned
    first_step: int = 0  # env steps that earlier parts of the run have learnt from
    # Whether the given share of a batch suffices; only LocalSource asks, in a gradient worker.
    stops_early: Callable[[float], bool] | None = None


class Weights(Protocol):
    """The published weights, as the threads and processes that act read them."""

    @property
    def version(self) -> int:
        """The newest version."""

    def refresh(self, replica: nn.Module, held: int | None, wanted: int | None = None) -> int:
        """Loads the wanted or newest version, unless `replica` holds it; returns its number."""
