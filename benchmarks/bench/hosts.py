# SPDX-License-Identifier: Apache-2.0
"""Predicts a learner with many hosts from this machine's environments, inference and learning.

Each host is a machine like this one, with the environments that the flags ask for; the learner is
on another machine like it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from bench.limits import ENVIRONMENT, INFERENCE, LEARNER, Figure
from bench.scaling import Load, Network, Prediction
from torchbeast.core.base.checks import counted
from torchbeast.servers.env_servers import ServerPlan


def network_of(figures: Mapping[str, Figure]) -> Network:
    """Returns what the network costs."""
    inference, learner = figures[INFERENCE], figures[LEARNER]
    return Network(
        inference_us=inference.cpu_us,
        learning_us=learner.cpu_us,
        inference_rate=inference.steps_per_second,
        learning_rate=learner.steps_per_second,
    )


def load_of(
    figures: Mapping[str, Figure], plans: Sequence[ServerPlan], hosts: int, frame_bytes: int
) -> Load:
    """Returns the load of that many hosts, whose connections have TLS."""
    streams = sum(plan.num_streams for plan in plans)
    envs = sum(plan.num_envs for plan in plans)
    return Load(
        streams=hosts * streams,
        envs_per_stream=max(1, envs // streams),
        frame_bytes=frame_bytes,
        step_s=envs / figures[ENVIRONMENT].steps_per_second,
    )


def table(found: Prediction, title: str) -> Table:
    """Returns a row per limit."""
    made = Table(title=title, title_justify="left")
    made.add_column("limit of one learner")
    made.add_column("steps/s", justify="right")
    for name, limit in sorted(found.limits.items(), key=lambda entry: entry[1]):
        made.add_row(name, f"{limit:,.0f}")
    return made


def sentence(found: Prediction, hosts: int) -> str:
    """Returns the prediction in words, and how many hosts one learner takes in."""
    offered = found.limits["environments"]
    rest = min(limit for name, limit in found.limits.items() if name != "environments")
    said = f"{hosts} hosts make {found.steps_per_second:,.0f} steps/s with one learner."
    enough = max(1, math.floor(hosts * rest / offered))
    if enough >= hosts:
        return f"{said} The {counted(hosts, 'host')} limit it; one learner takes in {enough:,}."
    learners = math.ceil(offered / rest)
    return (
        f"{said} The learner's {found.limit} limits it: {counted(enough, 'host')} would do. All "
        f"hosts need at least {counted(learners, 'such learner')} (torchrun), or a faster machine."
    )
