# SPDX-License-Identifier: Apache-2.0
"""Predicts the steps/s of learners whose environments are on other machines.

    transport us = A / E + B + C kB
    steps/s      = min(S E / (t + LATENCY), cores / (transport + inference + learning),
                       inference alone, learning alone, link / bytes)

S streams of E environments, whose step takes t; kB: of an environment's new frame. Each term of the
minimum is a limit, and the smallest one has the name that the prediction reports. Several learners
have cores, streams and link of their own, and the EFFICIENCY that was measured.

`benchmarks/scale.py fit` computes the constants from docs/results/scale/cost.csv, and its part
`rate` compares predictions with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# CPU us of the learner's process, on an AMD EPYC core: A of each message, B of each step, C of each
# kB. Key: whether the connection has TLS.
TRANSPORT = {False: (60.0, 1.0, 1.0), True: (80.0, 1.0, 2.0)}
LATENCY_S = 0.002  # between a step and the action that follows it, when nothing is busy
EFFICIENCY = 0.9  # of each further learner of torchrun


@dataclass(frozen=True, kw_only=True)
class Load:
    """The environments of a run, all learners together."""

    streams: int
    envs_per_stream: int
    frame_bytes: int  # of an environment's step
    step_s: float  # how long a stream's step takes, at the host
    tls: bool = True


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


def transport_us(load: Load) -> float:
    """Returns the CPU time of receiving and storing a step, in microseconds."""
    per_message, per_step, per_kb = TRANSPORT[load.tls]
    return per_message / load.envs_per_stream + per_step + per_kb * load.frame_bytes / 1000


def predict(
    load: Load,
    network: Network,
    cores: int,
    learners: int = 1,
    link_bytes: float = float("inf"),
    beside_us: float = 0.0,
) -> Prediction:
    """Returns the limits of that many learners.

    cores, link_bytes: cores and bytes/s of each learner's machine. beside_us: CPU time of a step in
    other processes that share the cores.
    """
    learner_us = transport_us(load) + network.inference_us + network.learning_us
    times = learners * EFFICIENCY ** (learners > 1)
    return Prediction(
        {
            "environments": load.streams * load.envs_per_stream / (load.step_s + LATENCY_S),
            "cores": times * cores * 1e6 / (learner_us + beside_us),
            "inference": times * network.inference_rate,
            "learning": times * network.learning_rate,
            "link": learners * link_bytes / load.frame_bytes,
        },
        learner_us,
    )
