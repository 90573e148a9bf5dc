# SPDX-License-Identifier: Apache-2.0
"""Diagnoses a run: where its time goes, which stage limits it, and what helps.

    workers   environment   stepping
              inference     choosing actions (MonoBeast), waiting for actions (PolyBeast)
              queueing      waiting for queue space for a rollout
    learner   learning      in an update
              waiting       for a batch

If workers wait for queue space, the learner is the bottleneck. If the learner waits, the workers
are, and the stage with the largest share of their time says why. In a step, an environment computes
or waits, for example for a simulator elsewhere: the processor time of the run's processes, next to
the time of all cores, tells them apart.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from torchbeast.collect.contract import (
    ACTOR_STAGES,
    CollectionPlan,
    LostStream,
    describe_lost_streams,
    shortage_of,
)
from torchbeast.fleets.system import CoreTime
from torchbeast.fleets.waiting import STALL_S, WAIT_S, Reminder

LEARNER_STAGES = ("learning", "waiting")
STAGES = ACTOR_STAGES + LEARNER_STAGES

_MINIMUM_S = 8.0  # shares over a shorter time are unreliable
_MUCH = 0.25  # share of waiting from which on advice is worthwhile
_BUSY = 0.5  # with a smaller share of learning, the learner is not the bottleneck
_FULL = 0.85  # share of the cores in use from which on there is no time left
_LITTLE = 0.25  # processor time below which a process waits; share of cores that others may take
_OLD = 16.0  # mean policy lag up to which V-trace lost nothing: docs/results/lag.md


class Reading(NamedTuple):
    """The seconds spent in each stage since the start, at one moment."""

    time: float
    seconds: Mapping[str, float]
    writing: float = 0.0  # seconds in which the learner waited for files
    cores: CoreTime = CoreTime()


class Shares(NamedTuple):
    """Shares of the workers' time (the first three; their sum is 1) and of the learner's (two).

    NaN if unknown.

    writing: part of the learner's waiting.
    own: cores that the run's processes use; wanted: and for which they wait.
    used: share of the machine's cores that any process uses.
    """

    environment: float
    inference: float
    queueing: float
    learning: float
    waiting: float
    writing: float = 0.0
    own: float = math.nan
    wanted: float = math.nan
    used: float = math.nan

    def __str__(self) -> str:
        workers = ", ".join(f"{name} {percent(getattr(self, name))}" for name in ACTOR_STAGES)
        learner = ", ".join(f"{name} {percent(getattr(self, name))}" for name in LEARNER_STAGES)
        return f"workers: {workers}; learner: {learner}"


UNKNOWN = Shares(*[math.nan] * 5)

Limit = Literal["learner", "room", "environment", "inference", "cores", "files", "none"]


class Diagnosis(NamedTuple):
    """The stage that limits the run, or the fate of its streams, and a message with advice."""

    limit: Limit | Literal["lost", "ending"]
    sentence: str


def spent(now: Reading, before: Reading) -> dict[str, float]:
    """Returns the seconds of every stage between two readings."""
    return {
        name: max(0.0, now.seconds.get(name, 0.0) - before.seconds.get(name, 0.0))
        for name in STAGES
    }


def shares(now: Reading, before: Reading) -> Shares:
    """Returns the shares of the time between two readings."""
    seconds = spent(now, before)
    learner = _fractions(seconds, LEARNER_STAGES)
    total = sum(seconds[name] for name in LEARNER_STAGES)
    writing = (now.writing - before.writing) / total if total > 0 else math.nan
    use = _use(now.cores, before.cores, max(1e-9, now.time - before.time))
    return Shares(**_fractions(seconds, ACTOR_STAGES), **learner, writing=writing, **use)


def _use(now: CoreTime, before: CoreTime, seconds: float) -> dict[str, float]:
    """Returns how many cores were in use for these seconds, by the names of `Shares`."""
    own = (now.own - before.own) / seconds
    delayed = max(0.0, now.delayed - before.delayed) / seconds  # less once a process has ended
    used = ((late - early) / seconds for late, early in zip(now.used, before.used, strict=False))
    return {"own": own, "wanted": own + delayed, "used": max(used, default=math.nan)}


def _fractions(seconds: Mapping[str, float], names: tuple[str, ...]) -> dict[str, float]:
    total = sum(seconds[name] for name in names)
    return {name: seconds[name] / total if total > 0 else math.nan for name in names}


class RecentShares:
    """Computes shares over the last ten seconds, with a reading a second."""

    def __init__(self) -> None:
        self._readings: collections.deque[Reading] = collections.deque(maxlen=11)

    def add(self, now: Reading) -> Shares:
        """Adds a reading and returns the shares; unknown for the first few seconds."""
        self._readings.append(now)
        before = self._readings[0]
        return shares(now, before) if now.time - before.time >= _MINIMUM_S else UNKNOWN


def diagnose(
    shares: Shares, collection: CollectionPlan, mean_lag: float = math.nan
) -> Diagnosis | None:
    """Returns the bottleneck of the run; None while the shares are unknown.

    mean_lag: policy lag of the newest batch. If it is large, the message also says what reduces it.
    """
    bottleneck = _bottleneck(shares, collection)
    if bottleneck is None or collection.fixed_lag is not None or not mean_lag > _OLD:
        return bottleneck
    advice = f"raise batch_size, because the policy lag is {mean_lag:.0f} versions"
    return Diagnosis(bottleneck.limit, f"{bottleneck.sentence}; {advice}")


def _bottleneck(shares: Shares, collection: CollectionPlan) -> Diagnosis | None:
    if any(map(math.isnan, shares[: len(STAGES)])):
        return None
    idle, room = f"learner idle {percent(shares.waiting)}", percent(shares.queueing)
    if (others := _taken_cores(shares, collection)) is not None:  # who slow all stages
        taken = f"other programs are using {others:.1f} of the {collection.cores} cores"
        state = f"{idle}, workers blocked {room}"
        return Diagnosis("cores", f"{taken} ({state}): stop them, or use another machine")
    if shares.writing >= _MUCH:
        return Diagnosis(
            "files",
            f"the learner waits for files {percent(shares.writing)} of its time: use a faster file "
            "system for savedir or a larger log_interval",
        )
    if shares.queueing >= _MUCH and collection.fixed_lag is not None:
        turns = f"workers and learner take turns with fixed_lag {collection.fixed_lag}"
        return Diagnosis("room", f"{turns} ({idle}, workers blocked {room})")
    if shares.queueing >= _MUCH and shares.learning >= _BUSY:
        return Diagnosis(
            "learner",
            f"the learner is the bottleneck (workers blocked {room}): larger updates "
            "(batch_size, unroll_length) or a smaller model help",
        )
    if shares.queueing >= _MUCH:
        room_of = "num_buffers" if collection.acts_where_it_steps else "max_learner_queue_size"
        advice = f"a larger {room_of} lets them continue, with older data"
        return Diagnosis("room", f"{idle}, but workers blocked {room}: {advice}")
    if shares.waiting < _MUCH:
        return Diagnosis("none", f"balanced ({idle}, workers blocked {room})")
    if shares.environment >= shares.inference:
        doing = "environments waiting" if _waits(shares, collection) else "environments busy"
        advice = _faster_environments(shares, collection)
        text = f"{idle}, {doing} {percent(shares.environment)}: {advice}"
        return Diagnosis("environment", text)
    busy, advice = percent(shares.inference), _larger_batches(collection)
    text = f"{idle}, inference busy {busy}: {advice}"
    return Diagnosis("inference", text)


def diagnose_lost_streams(lost_streams: Sequence[LostStream], live: int) -> Diagnosis | None:
    """Returns a diagnosis that names the lost streams, while `live` others play, or None.

    It replaces the usual advice, because more servers would not help.
    """
    if not lost_streams:
        return None
    return Diagnosis(
        "ending" if shortage_of(lost_streams) else "lost", describe_lost_streams(lost_streams, live)
    )


def _waits(shares: Shares, collection: CollectionPlan) -> bool:
    """Returns whether the run's processes hardly compute, and do not wait for cores either."""
    return shares.wanted < _LITTLE * min(collection.processes or 0, collection.cores)


def _taken_cores(shares: Shares, collection: CollectionPlan) -> float | None:
    """Returns the number of cores that other programs take from this run, unless it is small."""
    others, cores = shares.used * collection.cores - shares.own, collection.cores
    if not collection.is_local or collection.processes is None or _waits(shares, collection):
        return None  # servers are other programs too
    return others if shares.used >= _FULL and others >= _LITTLE * cores else None


def _faster_environments(shares: Shares, collection: CollectionPlan) -> str:
    cores, has_free_cores = collection.cores, collection.has_free_cores
    used = shares.used if collection.is_local else shares.own / cores
    if collection.processes is None and not (collection.is_local and used >= _FULL):
        hosts = "" if collection.is_local else ", or add hosts if their cores are in use"
        return f"raise num_envs and num_servers in polybeast_env{hosts}"
    if _waits(shares, collection) or (used < _FULL and not has_free_cores):
        run = f"this run uses {shares.own:.1f} of {cores} cores"
        return f"raise num_envs and {collection.of_processes}; {run}"
    if has_free_cores and not used >= _FULL:
        return _more_processes(collection)
    return f"{cores} of {cores} cores are busy; only more cores or a faster environment would help"


def _more_processes(collection: CollectionPlan) -> str:
    """Advises to use more processes, with the setting that limits their number."""
    has_most = collection.processes == collection.num_envs
    limit = "num_envs" if has_most else collection.of_processes
    return f"raise {limit}; {collection.processes} of {collection.cores} cores step environments"


def _larger_batches(collection: CollectionPlan) -> str:
    if collection.acts_where_it_steps and collection.has_free_cores:
        return _more_processes(collection)
    # polybeast_learner has num_envs too, but it does not make environments.
    whose = " in polybeast_env" if collection.processes is None else ""
    threads = "" if collection.acts_where_it_steps else " or, on a GPU, raise num_inference_threads"
    return f"raise num_envs{whose} for larger batches{threads}"


def percent(share: float) -> str:
    """Formats a share as "62 %"; NaN as a dash."""
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"


def alive(status: Mapping[str, float]) -> tuple[str, int]:
    """Returns the name of what collects, and how many of them are alive: PolyBeast's streams of
    environment servers, or the workers of MonoBeast and RayBeast.
    """
    for name in ("streams", "workers"):
        if (count := status.get(f"live_{name}")) is not None:
            return name, int(count)
    return "streams", 0


class Watchdog:
    """Produces at most one warning per minute while a run is stuck, or while workers hang and the
    others continue. Used by one thread.

    The status of a source contains the sizes of its queues. Walking back from the learner, the
    consumer of the first queue with enough entries is stuck (a whole batch of rollouts, or any
    entry in the other queues). If all queues are empty, nothing arrives, and the source may know
    which worker hangs.
    """

    def __init__(self, now: float, batch_size: int) -> None:
        """Starts the clock; batch_size: rollouts in a batch of the learner."""
        self._batch_size = batch_size
        self._updates = -1
        self._stall = Reminder(now)
        self._hang = Reminder(now, STALL_S - WAIT_S)  # hangs are described after WAIT_S
        self._lost = 0  # streams or workers lost until the last update

    def restart(self, now: float) -> None:
        """Notes that the learner is not waiting now."""
        self._stall.restart(now)
        self._hang.restart(now)

    def check(
        self,
        updates: int,
        status: Mapping[str, float],
        now: float,
        hanging: str = "",
        learner: str = "",
    ) -> str | None:
        """Returns a warning if one is due, else None.

        updates: of this part of the run.
        hanging: the source's description of workers that hang, or "".
        learner: what the learner waits for other than a batch, or "".
        """
        if updates != self._updates:
            self._updates, self._lost = updates, _lost(status)
            self._stall.restart(now)
        if not hanging:
            self._hang.restart(now)
        if (seconds := self._stall.due(now)) is None:
            return hanging if self._hang.due(now) is not None else None
        self._hang.delay(now)
        state = ", ".join(f"{name} {value}" for name, value in status.items())
        suspect = self._suspect(status, _lost(status) - self._lost, hanging)
        return f"no update for {seconds:.0f} s: {learner or suspect} ({state})"

    def _suspect(self, status: Mapping[str, float], lost: int, hanging: str) -> str:
        """Describes the probable cause; lost: streams or workers lost since the last update."""
        collectors, count = alive(status)
        rollouts = status.get("learner_queue_size", 0)
        if not status.keys() & {"live_workers", "live_streams"}:  # nothing has been collected yet
            return hanging or "no worker has collected a batch"
        if count == 0:
            has_any = self._updates or _lost(status)
            state = f"all {collectors} are gone" if has_any else f"the {collectors} are starting"
            return hanging or state
        if rollouts >= self._batch_size:
            return "a batch of rollouts is ready, but the learner does not take it"
        few = f"{rollouts:g} of {self._batch_size} rollouts of a batch are ready"
        if status.get("rollout_queue_size", 0) > 0:
            return f"{few}, more are queued: the learner has not returned its last batch"
        if status.get("inference_queue_size", 0) > 0:
            return f"{few}: inference does not respond"
        return f"{few}: {hanging or self._what_is_slow(status, lost)}"

    def _what_is_slow(self, status: Mapping[str, float], lost: int) -> str:
        collectors, count = alive(status)
        if lost:
            return f"{lost} {collectors} were lost and replaced before completing a rollout"
        if status.get("waiting_workers") == count:
            return "the learner is computing an update, and all workers wait for its weights"
        if status.get("replay_fill", 0) > 0 and self._updates == 0:
            return "collecting steps for the replay, which is still too small to sample from"
        return "the environments have not completed a rollout"


def _lost(status: Mapping[str, float]) -> int:
    """Returns the number of streams that broke, or workers that died, so far."""
    return int(status.get("lost_streams", status.get("replaced_workers", 0)))
