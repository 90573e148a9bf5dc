# SPDX-License-Identifier: Apache-2.0
"""Predicts the end-to-end rate from the stages alone, and names the bottleneck.

Stages share the cores, so their CPU times per step add up:

    predicted steps/s = cores / (environment + transport + inference + learner, CPU time per step)

End to end is never faster than a stage alone, which matters where a stage does not use all cores:
on a GPU, or in one thread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.sample import Sample
from torchbeast.reporting.diagnosis import percent

ENVIRONMENT, TRANSPORT, INFERENCE, LEARNER = "environment", "transport", "inference", "learner"
REPLAY = "replay"  # only with --replay_size
STAGES = (
    ENVIRONMENT,
    TRANSPORT,
    INFERENCE,
    LEARNER,
)  # of every run, in the order that a step passes through them
END_TO_END = "PolyBeast"

_FAR_BELOW = 0.75  # of the prediction
_IDLE = 0.75  # share of busy cores, below which some are waiting
_FASTER = 1.2  # than a stage alone: then larger batches sped it up, and it is no bottleneck


class Figure(NamedTuple):
    """The medians of a stage's measurements."""

    steps_per_second: float
    cpu_us: float  # CPU time per step of all processes; NaN where the system does not report it


class Verdict(NamedTuple):
    """The bottleneck: a stage, "waiting" or "sharing" (see `judge`), and a sentence about it."""

    limit: str
    sentence: str


def figure(samples: Sequence[Sample]) -> Figure:
    """Returns the medians of the samples of one stage."""
    return Figure(
        statistics.median(sample.steps_per_second for sample in samples),
        statistics.median(sample.cpu_us for sample in samples),
    )


def cpu_sum(figures: Mapping[str, Figure]) -> float:
    """Returns the CPU time of a step in all stages, in microseconds; NaN if one is unknown."""
    return sum(figures[name].cpu_us if name in figures else math.nan for name in _of_run(figures))


def _of_run(figures: Mapping[str, Figure]) -> tuple[str, ...]:
    """Returns the stages of the run that was measured."""
    return (*STAGES, REPLAY) if REPLAY in figures else STAGES


def predict(figures: Mapping[str, Figure], cores: int) -> float:
    """Predicts end-to-end steps/s; NaN if the cost of a stage is unknown."""
    rates = [figures[name].steps_per_second for name in _of_run(figures) if name in figures]
    by_cpu = cores * 1e6 / cpu_sum(figures)
    return by_cpu if math.isnan(by_cpu) else min(by_cpu, *rates)


def judge(figures: Mapping[str, Figure], cores: int) -> Verdict:
    """Names the bottleneck.

    A stage: the end-to-end rate is near the prediction, and that stage takes the largest share of
    the CPU time, or alone is no faster than the prediction. "waiting": the rate is far below the
    prediction, and cores are idle. "sharing": it is far below with busy cores, because stages that
    share cores cost more than alone.
    """
    predicted, measured = predict(figures, cores), figures.get(END_TO_END)
    if measured is None or math.isnan(predicted):
        return _limiting_stage(figures, cores)
    if measured.steps_per_second >= _FAR_BELOW * predicted:
        return _limiting_stage(figures, cores)
    return _limit_beyond_stages(figures, predicted, measured, cores)


def _limiting_stage(figures: Mapping[str, Figure], cores: int) -> Verdict:
    """Returns the stage whose speed-up would help most."""
    names = _of_run(figures)
    stages = {name: figures[name] for name in names if name in figures}
    slowest = min(stages, key=lambda name: stages[name].steps_per_second)
    known = sum(stage.cpu_us for stage in stages.values())
    alone = stages[slowest].steps_per_second
    is_slow = alone < cores * 1e6 / known and not _is_faster(figures.get(END_TO_END), alone)
    if math.isnan(known) or is_slow:
        return Verdict(slowest, f"Bottleneck: {slowest}. Alone it reaches {alone:,.0f} steps/s.")
    costly = max(stages, key=lambda name: stages[name].cpu_us)
    share = percent(stages[costly].cpu_us / known)
    every = "all stages" if len(stages) == len(names) else "the stages measured"
    return Verdict(costly, f"Bottleneck: {costly}. It takes {share} of the CPU time of {every}.")


def _is_faster(measured: Figure | None, alone: float) -> bool:
    return measured is not None and measured.steps_per_second > _FASTER * alone


def _limit_beyond_stages(
    figures: Mapping[str, Figure], predicted: float, measured: Figure, cores: int
) -> Verdict:
    """Explains an end-to-end rate far below its prediction."""
    share = percent(measured.steps_per_second / predicted)
    below = f"{END_TO_END} reaches {share} of the rate that its stages allow"
    busy = measured.steps_per_second * measured.cpu_us / 1e6
    if busy < _IDLE * cores:
        return Verdict(
            "waiting",
            f"Bottleneck: processes that wait for each other. {below}, with {busy:.1f} of {cores} "
            "cores busy; raise --num_envs.",
        )
    return Verdict(
        "sharing",
        f"Bottleneck: sharing of cores. {below}. A step costs {measured.cpu_us:,.0f} us of CPU "
        f"time there, and {cpu_sum(figures):,.0f} us in the stages alone.",
    )
