# SPDX-License-Identifier: Apache-2.0
"""Predicts the steps/s of learners whose environments are on other machines.

    transport = A / E + B + C kB                                       CPU us of a step
    steps/s   = min(S E / t,  0.85 K cores / (transport + inference + learning),
                    K inference alone,  K learning alone,  K / Python,  K link / bytes)

S streams of E environments, whose steps take t, are shared by K learners. kB: of an environment's
new frame. Each term is a limit, and the smallest has the name that a prediction reports. Python is
the time of the threads that run Python, by a formula like transport's: only one of them runs at a
time.

A, B and C are fitted to docs/results/scale/cost.csv, which `benchmarks/scale.py cost` measures; its
part `rate` compares predictions with measurements.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

_USED = 0.85  # share of the cores that a saturated run uses: 0.79 to 0.93 in `rate`

COSTS = Path(__file__).parents[2] / "docs/results/scale/cost.csv"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The environments of a run, all learners together."""

    streams: int
    envs_per_stream: int
    frame_bytes: int  # of an environment's step
    step_s: float  # how long a stream's step takes, at the host
    tls: bool = True

    def terms(self) -> list[float]:
        """Returns the factors of A, B and C, and of what TLS adds to A and to C."""
        message, kb = 1 / self.envs_per_stream, self.frame_bytes / 1000
        return [message, 1.0, kb, message * self.tls, kb * self.tls]


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a network costs in the learner's process, as `torchbeast.bench` measures it."""

    inference_us: float  # CPU time of a step
    learning_us: float
    inference_rate: float = float("inf")  # steps/s when nothing else runs
    learning_rate: float = float("inf")


class Prediction(NamedTuple):
    """The limits in steps/s by name, of all learners, and the CPU time of a step in a learner."""

    limits: dict[str, float]
    learner_us: float

    @property
    def limit(self) -> str:
        """The name of the smallest limit."""
        return min(self.limits, key=lambda name: self.limits[name])

    @property
    def steps_per_second(self) -> float:
        """The smallest limit."""
        return min(self.limits.values())


def predict(
    load: Load,
    network: Network,
    cores: float,
    learners: int = 1,
    link_bytes: float = float("inf"),
    beside_us: float = 0.0,
) -> Prediction:
    """Returns the limits of that many learners, as if they did not wait for each other.

    cores, link_bytes: cores and bytes/s of each learner's machine. beside_us: CPU time of a step in
    other processes that share the cores.
    """
    learner_us = cost_us(load, "learner_us") + network.inference_us + network.learning_us
    limits = {
        "environments": load.streams * load.envs_per_stream / load.step_s,
        "cores": _USED * learners * cores * 1e6 / (learner_us + beside_us),
        "inference": learners * network.inference_rate,
        "learning": learners * network.learning_rate,
        "Python": learners * 1e6 / cost_us(load, "python_us"),
        "network link": learners * link_bytes / load.frame_bytes,
    }
    return Prediction(limits, learner_us)


def cost_us(load: Load, column: str) -> float:
    """Returns CPU us of a step in a learner without a network.

    column: "learner_us", of its process; "python_us", of its threads that run Python.
    """
    return float(np.dot(load.terms(), coefficients(column)))


@functools.cache
def coefficients(column: str) -> tuple[float, ...]:
    """Returns A, B, C, and what TLS adds to A and to C, as COSTS has measured them."""
    return fitted(measured(COSTS), column)


def measured(path: Path) -> list[Mapping[str, str]]:
    """Returns the rows of a file of `benchmarks/scale.py`."""
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def fitted(rows: Sequence[Mapping[str, str]], column: str) -> tuple[float, ...]:
    """Fits the five coefficients to a column: least squares of the relative errors."""
    values = np.array([float(row[column]) for row in rows])
    terms = np.array([load_of(row).terms() for row in rows])
    found, *_ = np.linalg.lstsq(terms / values[:, None], np.ones(len(rows)), rcond=None)
    return tuple(map(float, found))


def load_of(row: Mapping[str, str]) -> Load:
    """Returns the load that a row describes."""
    return Load(
        streams=int(row["streams"]),
        envs_per_stream=int(row["envs_per_stream"]),
        frame_bytes=int(row["frame_bytes"]),
        step_s=float(row["step_ms"]) / 1000,
        tls=row["tls"] == "1",
    )
