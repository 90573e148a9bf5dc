# SPDX-License-Identifier: Apache-2.0
"""What a run spends its time on, which stage limits it, and what to do about it.

    actors    environment   stepping
              inference     choosing actions (MonoBeast), waiting for them (PolyBeast)
              queueing      waiting for room to put a rollout
    learner   learning      in an update
              waiting       for a batch

Actors that wait for room mean a slow learner; a learner that waits means slow actors, and then
the larger share of their time names the stage.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchbeast.sources.contract import ACTOR_STAGES, Away, describe_away

LEARNER_STAGES = ("learning", "waiting")
STAGES = ACTOR_STAGES + LEARNER_STAGES

_WINDOW_S = 10.0
_MINIMUM_S = 8.0  # a shorter time says little
_LARGE_MODEL = 500_000  # parameters; below, an update is mostly overhead
_MUCH = 0.25  # a share of waiting that is worth a remedy
_BUSY = 0.5  # a learner with less to do is not the limit, even if actors wait

Limit = Literal["learner", "room", "environment", "inference", "none"]


class Reading(NamedTuple):
    """What was spent since the start, by stage, at one moment."""

    time: float
    seconds: Mapping[str, float]


class Shares(NamedTuple):
    """Of the actors' time (the first three add up to 1) and of the learner's (the last two).

    NaN where nothing is known.
    """

    environment: float
    inference: float
    queueing: float
    learning: float
    waiting: float

    def __str__(self) -> str:
        actors = ", ".join(f"{name} {percent(getattr(self, name))}" for name in ACTOR_STAGES)
        learner = ", ".join(f"{name} {percent(getattr(self, name))}" for name in LEARNER_STAGES)
        return f"actors: {actors}; learner: {learner}"


UNKNOWN = Shares(*[math.nan] * 5)


class Diagnosis(NamedTuple):
    """Which stage limits the run, and one sentence that says so and what helps."""

    limit: Limit | Literal["lost"]  # lost: streams, see lost_streams
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Collection:
    """How a program collects."""

    program: str  # monobeast, polybeast, polybeast_learner
    num_actors: int  # environments in all
    processes: int | None  # of this run that step environments here; None: others' servers
    fixed_lag: int | None


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What advice depends on."""

    collection: Collection
    cores: int
    has_gpu: bool
    has_large_model: bool

    @property
    def program(self) -> str:
        """monobeast, polybeast or polybeast_learner."""
        return self.collection.program

    @property
    def processes(self) -> int | None:
        """Processes of this run that step environments here; None: others' servers."""
        return self.collection.processes

    @property
    def has_free_cores(self) -> bool:
        """Whether some core has no process of the run that steps environments."""
        return self.processes is not None and self.processes < self.cores


def setup_of(collection: Collection, cores: int, has_gpu: bool, model_size: int) -> Setup:
    """What advice depends on. `model_size`: parameters."""
    return Setup(
        collection=collection,
        cores=cores,
        has_gpu=has_gpu,
        has_large_model=model_size >= _LARGE_MODEL,
    )


def spent(now: Reading, before: Reading) -> dict[str, float]:
    """Seconds of every stage between two readings."""
    return {
        name: max(0.0, now.seconds.get(name, 0.0) - before.seconds.get(name, 0.0))
        for name in STAGES
    }


def shares(now: Reading, before: Reading) -> Shares:
    """Of the time between two readings."""
    seconds = spent(now, before)
    return Shares(**_parts(seconds, ACTOR_STAGES), **_parts(seconds, LEARNER_STAGES))


def _parts(seconds: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    total = sum(seconds[name] for name in names)
    return {name: seconds[name] / total if total > 0 else math.nan for name in names}


class Window:
    """Shares over the last ten seconds."""

    def __init__(self) -> None:
        self._readings: collections.deque[Reading] = collections.deque()

    def add(self, now: Reading) -> Shares:
        """The shares at this reading; unknown until a few seconds are seen."""
        self._readings.append(now)
        while len(self._readings) > 2 and now.time - self._readings[1].time >= _WINDOW_S:
            self._readings.popleft()
        before = self._readings[0]
        return shares(now, before) if now.time - before.time >= _MINIMUM_S else UNKNOWN


def diagnose(shares: Shares, setup: Setup) -> Diagnosis | None:
    """What limits the run; None while too little is known."""
    if any(map(math.isnan, shares)):
        return None
    limit = _limit(shares)
    return Diagnosis(limit, f"{_finding(limit, shares)}: {_advice(limit, setup)}")


def lost_streams(away: Sequence[Away], live: int) -> Diagnosis | None:
    """Names the streams that are lost while `live` others play; None where there are none. More
    servers are no remedy for that.
    """
    return Diagnosis("lost", describe_away(away, live)) if away else None


def _limit(shares: Shares) -> Limit:
    if shares.queueing >= _MUCH:
        return "learner" if shares.learning >= _BUSY else "room"
    if shares.waiting < _MUCH:
        return "none"
    return "environment" if shares.environment >= shares.inference else "inference"


def _finding(limit: Limit, shares: Shares) -> str:
    idle, room = f"learner idle {percent(shares.waiting)}", percent(shares.queueing)
    match limit:
        case "learner":
            return f"actors wait for room {room} of their time"
        case "room":
            return f"{idle}, yet actors wait for room {room} of their time"
        case "environment":
            return f"{idle}, environments busy {percent(shares.environment)}"
        case "inference":
            return f"{idle}, choosing actions takes {percent(shares.inference)} of the actors' time"
        case "none":
            return f"{idle}, actors wait for room {room}"


def _advice(limit: Limit, setup: Setup) -> str:
    match limit:
        case "learner":
            return f"the learner is the limit; {_faster_learner(setup)}"
        case "room":
            return _more_room(setup)
        case "environment":
            return _faster_environments(setup)
        case "inference":
            return _faster_inference(setup)
        case "none":
            return "both keep pace"


def _faster_learner(setup: Setup) -> str:
    if not setup.has_large_model:
        return "larger updates (--batch_size, --unroll_length) cost less a step"
    return f"a smaller --model{'' if setup.has_gpu else ' or a GPU'} helps, more actors do not"


def _more_room(setup: Setup) -> str:
    if setup.program != "monobeast":
        return "a larger --max_learner_queue_size lets them go on"
    if setup.collection.fixed_lag is not None:
        return f"they wait for the weights that --fixed_lag {setup.collection.fixed_lag} demands"
    return "more --num_buffers let them go on"


def _faster_environments(setup: Setup) -> str:
    if setup.processes is None:
        return "add servers (polybeast_env --num_servers) where cores are free"
    if setup.has_free_cores:
        return _more_processes(setup)
    if setup.has_gpu or not setup.has_large_model:
        return f"all {setup.cores} cores are in use; only more cores or a faster environment help"
    return (
        f"they share all {setup.cores} cores with the learner, more processes do not help; "
        "more cores or a smaller --model do"
    )


def _more_processes(setup: Setup) -> str:
    """The number of processes follows that of environments, unless it was given."""
    by_itself = "--num_servers" if setup.program == "polybeast" else "--num_processes"
    flag = "--num_actors" if setup.processes == setup.collection.num_actors else by_itself
    return f"raise {flag}; {setup.processes} of {setup.cores} cores step environments"


def _faster_inference(setup: Setup) -> str:
    if setup.program == "monobeast" and setup.has_free_cores:
        return _more_processes(setup)
    larger_batches = "more --num_actors, which makes larger batches"
    if setup.program != "monobeast" and setup.has_gpu:
        return f"raise --num_inference_threads, or add {larger_batches}"
    return f"add {larger_batches}{', or use a smaller --model' * setup.has_large_model}"


def percent(share: float) -> str:
    """62 %; a dash for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"


def alive(status: Mapping[str, int]) -> tuple[str, int]:
    """What collects, by its name, and how many of it live: streams of environment servers in
    PolyBeast, actor processes in MonoBeast."""
    for name in ("streams", "actors"):
        if (count := status.get(f"live_{name}")) is not None:
            return name, count
    return "streams", 0
