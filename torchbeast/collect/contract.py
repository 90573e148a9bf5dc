# SPDX-License-Identifier: Apache-2.0
"""What a learner and its source promise each other; tests/support/compliance/ checks sources.

LearnerInfo --> CollectionPlan.source() --> Source --> batches --> the learner
                      the threads and processes that act <-- Weights, of a Publisher
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from torchbeast.core.base.checks import counted, first_of
from torchbeast.fleets.system import available_cores

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchbeast.core.actors.contract import Mode
    from torchbeast.core.base.specs import Precision
    from torchbeast.core.storages.rollout import RolloutSpec
    from torchbeast.envs.spec import EnvSpec
    from torchbeast.fleets.supervisor import Supervisor

ACTOR_STAGES = ("environment", "inference", "queueing")
"""Stages of collecting: stepping, choosing actions, waiting for room for a rollout."""


class TooFewStreams(NamedTuple):
    """Fewer streams than --min_streams are connected."""

    connected: int
    needed: int
    seconds: float  # until the run ends, unless enough streams connect before
    of: str = ""  # whose streams these are: " of rank 1"


class LostStream(NamedTuple):
    """A stream that was lost and has not reconnected."""

    where: str  # its server's address
    seconds: float  # since it was lost
    shortage: TooFewStreams | None = None  # of streams of its source, if there are too few
    why: str = ""  # the error that ended its last connection, in one line; "": no answer


class Source(Protocol):
    """Yields the batches that a learner trains on."""

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
        """Returns the seconds that all workers have spent since the start, by ACTOR_STAGES; and as
        "computing" their processor time, if they may be on other machines.
        """

    def hanging(self) -> str:
        """Describes workers that have been in one stage for over WAIT_S, or returns ""."""

    def lost_streams(self) -> list[LostStream]:
        """Returns the streams that were lost and have not reconnected."""


class Publisher(Protocol):
    """Receives the learner's weights after each update."""

    def publish(self, model: nn.Module, version: int) -> None:
        """Publishes the model's current weights as this version."""


@dataclass(frozen=True, kw_only=True)
class LearnerInfo:
    """The facts about a learner that its source needs to know."""

    rollouts: RolloutSpec  # whose agent acts
    batch_size: int  # new rollouts in a batch
    weights: Any  # a Publisher and Weights, of the CollectionPlan
    device: torch.device  # batches for a GPU are in pinned memory
    mode: Mode  # in which actions are chosen
    precision: Precision  # of the actor's features on the CPU
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


@dataclass(frozen=True, kw_only=True)
class CollectionPlan:
    """Describes how a run collects, and makes its source and the weights that act.

    Each kind of source has a subclass in its own module, so a program imports only its own kind.
    The fields are the facts on which advice about the run's speed depends.
    """

    num_envs: int
    processes: int | None  # processes of this run that step environments; None: others' servers do
    fixed_lag: int | None
    cores: int = field(default_factory=available_cores)  # of all machines together
    is_local: bool = True  # whether all environments are on the learner's machine

    acts_where_it_steps: ClassVar[bool] = True
    """Whether actions are chosen in the processes that step environments."""
    of_processes: ClassVar[str] = "num_workers"
    """Name of the setting that holds the number of processes."""
    plays_ahead: ClassVar[bool] = True
    """Whether the source may collect while the learner does not wait for a batch."""

    @property
    def has_free_cores(self) -> bool:
        """Whether there are more cores than processes of this run that step environments."""
        return self.processes is not None and self.processes < self.cores

    def weights(self, model: nn.Module, version: int) -> Any:
        """Returns the Publisher, which publishes the model's weights as this version."""
        from torchbeast.collect.weights import PublishedWeights

        return PublishedWeights(model, version)

    def source(self, learner: LearnerInfo, env: EnvSpec, ending: ExitStack) -> Source:
        """Makes the source of a run.

        Args:
            learner: The learner's agent, weights and batches.
            env: The environment.
            ending: Ends the workers or closes the environments of the source.
        """
        raise NotImplementedError


def describe_lost_streams(streams: Sequence[LostStream], live: int) -> str:
    """Describes the lost streams, at least one, while `live` others play."""
    is_all = not live and len(streams) > 1
    count = f"all {len(streams)}" if is_all else f"{len(streams)} of {len(streams) + live}"
    ago = since(streams).removeprefix("lost ").removeprefix("lost, ")
    where = first_of(list(dict.fromkeys(stream.where for stream in streams)))
    why = max(streams, key=lambda stream: stream.seconds).why  # of the stream that was lost first
    lost = f"Lost {count} streams ({ago}): {where}{f' ({why})' if why else ''}; reconnecting"
    if (short := shortage_of(streams)) is None:
        return lost
    return (
        f"{lost}. Giving up in {short.seconds:.0f} s unless at least "
        f"{counted(short.needed, 'stream')}{short.of} {'is' if short.needed == 1 else 'are'} "
        f"connected (--min_streams). Connected now: {short.connected}"
    )


def shortage_of(streams: Sequence[LostStream]) -> TooFewStreams | None:
    """Returns the shortage that will end the run first, or None."""
    found = [stream.shortage for stream in streams if stream.shortage is not None]
    return min(found, key=lambda shortage: shortage.seconds, default=None)


def since(streams: Sequence[LostStream]) -> str:
    """Returns "lost 12 s ago"; for several streams, the time of the first loss."""
    first = max(stream.seconds for stream in streams)
    return f"lost{', the first one' * (len(streams) > 1)} {first:.0f} s ago"
