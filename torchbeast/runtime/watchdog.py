# SPDX-License-Identifier: Apache-2.0
"""Says where a run is stuck when nothing is learnt any more."""

from __future__ import annotations

from collections.abc import Mapping

STALL_S = 60.0


class Watchdog:
    """One sentence for each minute without an update. Used by one thread."""

    def __init__(self, now: float, stall_seconds: float = STALL_S) -> None:
        self._stall_seconds = stall_seconds
        self._updates = -1
        self._since = now
        self._told = now

    def check(self, updates: int, status: Mapping[str, int], now: float) -> str | None:
        """A sentence when it is time for one."""
        if updates != self._updates:
            self._updates, self._since, self._told = updates, now, now
        if now - self._told < self._stall_seconds:
            return None
        self._told = now
        return f"nothing was learnt for {now - self._since:.0f} s: {_diagnosis(status)}"


def _diagnosis(status: Mapping[str, int]) -> str:
    figures = ", ".join(f"{name} {value}" for name, value in status.items())
    return f"{_suspect(status)} ({figures})"


def _suspect(status: Mapping[str, int]) -> str:
    if status.get("live_streams", 1) == 0:
        return "no environment server is connected"
    if status.get("inference_queue_size", 0) > 0:
        return "observations wait, and the policy does not answer them"
    if status.get("learner_queue_size", 0) > 0:
        return "rollouts wait, and the learner does not take them"
    return "both queues are empty, the environments do not step"
