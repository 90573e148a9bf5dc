# SPDX-License-Identifier: Apache-2.0
"""Counts what an environment server does, for the metrics of polybeast_env.

    threads of streams -- steps --> Activity of the process -- a report a second --> polybeast_env

A learner or `python -m torchbeast.status` asks the server itself, with its token and certificate;
polybeast_env has no certificate of a learner, and its server processes are its children.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

EVERY_S = 1.0


class Activity:
    """What the environments of a process have done. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps = 0
        self._open = 0

    def opened(self, streams: int) -> None:
        """Counts streams that are opened, or closed if negative."""
        with self._lock:
            self._open += streams

    def stepped(self, num_envs: int) -> None:
        """Counts a step of so many environments."""
        with self._lock:
            self._steps += num_envs

    def report(self) -> dict[str, int]:
        """Returns the counts as a report to the parent."""
        with self._lock:
            return {"steps": self._steps, "open_streams": self._open}


class CountedEnv:
    """A vector environment of one stream that counts its steps. It is open until it is closed."""

    def __init__(self, env: Any, activity: Activity) -> None:
        self._env, self._activity = env, activity
        self._num_envs, self._is_open = int(env.num_envs), True
        activity.opened(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        """Steps all environments."""
        self._activity.stepped(self._num_envs)
        return self._env.step(action)

    def close(self) -> None:
        """Closes the environments. May be called again."""
        if self._is_open:
            self._is_open = False
            self._activity.opened(-1)
            self._env.close()


def report_until(
    ended: threading.Event, activity: Activity, report: Callable[[dict[str, Any]], None]
) -> None:
    """Reports the counts once a second until the server has ended."""
    while not ended.wait(EVERY_S):
        report(activity.report())


def total(reports: Mapping[str, Mapping[str, int]], name: str) -> dict[str, float]:
    """Returns a count of every server, by its address."""
    return {address: float(report.get(name, 0)) for address, report in reports.items()}
