# SPDX-License-Identifier: Apache-2.0
"""What the stages alone predict of the whole, and what limits it.

Stages share the cores, so their processor times a step add up:

    predicted steps/s = cores / (environment + transport + inference + learner, CPU time a step)

and no whole is faster than one of its stages alone, which counts where a stage does not use all
cores: on a GPU, or in one thread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torchbeast.bench.sample import Sample
from torchbeast.reporting.diagnosis import percent

ENVIRONMENT, TRANSPORT, INFERENCE, LEARNER = "environment", "transport", "inference", "learner"
STAGES = (ENVIRONMENT, TRANSPORT, INFERENCE, LEARNER)  # what a step passes through
END_TO_END = "PolyBeast"

_FAR_BELOW = 0.75  # of the prediction
_IDLE = 0.75  # busy cores, of all: fewer are waiting for something
_FASTER = 1.2  # than a stage alone: that stage does not limit, the whole gives it larger batches


class Figure(NamedTuple):
    """Medians of a stage's measurements."""

    steps_per_second: float
    cpu_us: float  # a step, of all processes; NaN where the system does not tell


class Verdict(NamedTuple):
    """What limits: a stage, or "waiting", "sharing" (see `judge`)."""

    limit: str
    sentence: str


def figure(samples: Sequence[Sample]) -> Figure:
    """Of the samples of one stage."""
    return Figure(
        statistics.median(sample.steps_per_second for sample in samples),
        statistics.median(sample.cpu_us for sample in samples),
    )


def cpu_sum(figures: Mapping[str, Figure]) -> float:
    """Processor time of a step in all stages, microseconds; NaN where one is not known."""
    return sum(figures[name].cpu_us if name in figures else math.nan for name in STAGES)


def predict(figures: Mapping[str, Figure], cores: int) -> float:
    """Steps/s of the whole; NaN where a stage's cost is not known."""
    rates = [figures[name].steps_per_second for name in STAGES if name in figures]
    by_cpu = cores * 1e6 / cpu_sum(figures)
    return by_cpu if math.isnan(by_cpu) else min(by_cpu, *rates)


def judge(figures: Mapping[str, Figure], cores: int) -> Verdict:
    """Names what limits the whole.

    A stage: the whole is near the prediction, and that stage takes the largest share of the
    processor time, or alone is no faster than the prediction. "waiting": the whole is far below,
    and cores are idle. "sharing": it is far below with busy cores, because stages that share them
    cost more than alone.
    """
    predicted, whole = predict(figures, cores), figures.get(END_TO_END)
    if whole is None or math.isnan(predicted):
        return _largest(figures, cores)
    if whole.steps_per_second >= _FAR_BELOW * predicted:
        return _largest(figures, cores)
    return _what_is_lost(figures, predicted, whole, cores)


def _largest(figures: Mapping[str, Figure], cores: int) -> Verdict:
    """The stage that a faster whole needs most."""
    stages = {name: figures[name] for name in STAGES if name in figures}
    slowest = min(stages, key=lambda name: stages[name].steps_per_second)
    known = sum(stage.cpu_us for stage in stages.values())
    alone = stages[slowest].steps_per_second
    is_slow = alone < cores * 1e6 / known and not _is_faster(figures.get(END_TO_END), alone)
    if math.isnan(known) or is_slow:
        return Verdict(slowest, f"The {slowest} limits: alone it makes {alone:,.0f} steps/s.")
    costly = max(stages, key=lambda name: stages[name].cpu_us)
    share = percent(stages[costly].cpu_us / known)
    every = "all stages" if len(stages) == len(STAGES) else "the stages measured"
    return Verdict(
        costly, f"The {costly} limits: it takes {share} of the processor time of {every}."
    )


def _is_faster(whole: Figure | None, alone: float) -> bool:
    return whole is not None and whole.steps_per_second > _FASTER * alone


def _what_is_lost(
    figures: Mapping[str, Figure], predicted: float, whole: Figure, cores: int
) -> Verdict:
    """Why a whole is far below its prediction."""
    below = (
        f"{END_TO_END} makes {percent(whole.steps_per_second / predicted)} of what its stages allow"
    )
    busy = whole.steps_per_second * whole.cpu_us / 1e6
    if busy < _IDLE * cores:
        return Verdict(
            "waiting",
            f"Waiting limits: {below}, and {busy:.1f} of {cores} cores are busy; more "
            "--num_actors give them work.",
        )
    return Verdict(
        "sharing",
        f"Sharing limits: {below}. A step costs {whole.cpu_us:,.0f} us of processor time there, "
        f"and {cpu_sum(figures):,.0f} us in the stages alone.",
    )
