# SPDX-License-Identifier: Apache-2.0
"""Measures environments alone, with random actions, in PolyBeast's processes and streams."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.sample import Measure, Sample, check_goes_on
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets.child_process import ChildProcess, ChildReport, end_all
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.servers.env_servers import ServerPlan

_POLL_S = 0.02


@contextmanager
def environments(
    env: EnvSpec, plans: Sequence[ServerPlan], supervisor: Supervisor
) -> Iterator[Measure]:
    """Starts a process per plan, as for environment servers, and yields their measurement."""
    reports: queue.SimpleQueue[ChildReport] = queue.SimpleQueue()
    processes = [_process(i, env, plan, reports, supervisor) for i, plan in enumerate(plans)]

    def measure(seconds: float) -> Sample:
        for process in processes:
            process.send({"seconds": seconds})
        return _summed(_collect(reports, len(processes), supervisor))

    try:
        _collect(reports, len(processes), supervisor)  # until all are ready
        check_goes_on(supervisor)
        yield measure
    finally:
        end_all(processes)


def _process(
    index: int,
    env: EnvSpec,
    plan: ServerPlan,
    reports: queue.SimpleQueue[ChildReport],
    supervisor: Supervisor,
) -> ChildProcess:
    name = f"environment process {index}"
    arguments: dict[str, Any] = {
        "env": env.as_json(),
        "num_streams": plan.num_streams,
        "envs_per_stream": plan.envs_per_stream,
        "seed": index,
    }
    return ChildProcess(
        name,
        "bench.env_child",
        arguments,
        on_report=reports.put,
        on_end=lambda error: supervisor.fail(name, error),
    )


def _collect(
    reports: queue.SimpleQueue[ChildReport], count: int, supervisor: Supervisor
) -> list[ChildReport]:
    """Waits for a report of each process; returns fewer if the supervisor ended."""
    found: list[ChildReport] = []
    while len(found) < count and not supervisor.wait(0):
        try:
            found.append(reports.get(timeout=_POLL_S))
        except queue.Empty:
            continue
    return found


def _summed(reports: Sequence[ChildReport]) -> Sample:
    """Sums rates and costs of processes that ran at the same time."""
    rate = sum(report["steps"] / report["seconds"] for report in reports)
    seconds = max((report["seconds"] for report in reports), default=1.0)
    cost = sum(report["cpu_seconds"] / report["seconds"] for report in reports)
    return Sample(rate * seconds, seconds, cost * seconds)
