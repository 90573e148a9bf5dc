# SPDX-License-Identifier: Apache-2.0
"""Warnings about a run that has stopped learning, or about workers that hang while others go on.

The status of a source has the sizes of its queues. Walking back from the learner, the first queue
with enough entries, a whole batch of rollouts or any entry in the other queues, is the one whose
consumer is stuck. When all are empty nothing arrives, and the source may know which worker hangs.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchbeast.reporting.diagnosis import alive
from torchbeast.reporting.waiting import Reminder
from torchbeast.sources.contract import STALL_S, WAIT_S

_NONE_ALIVE = {
    "streams": "no environment server is connected",
    "actors": "no actor process is alive",
}
_LOST = {"streams": "lost_streams", "actors": "replaced_actors"}


class Watchdog:
    """Produces at most one warning per minute while a run is stuck. Used by one thread."""

    def __init__(self, now: float, batch_size: int) -> None:
        """Starts the clock; batch_size: rollouts in a batch of the learner."""
        self._batch_size = batch_size
        self._updates = -1
        self._stall = Reminder(now)
        self._hang = Reminder(now, STALL_S - WAIT_S)  # hangs are described after WAIT_S
        self._lost = 0  # streams or actors lost until the last update

    def restart(self, now: float) -> None:
        """Notes that the learner waits for nothing at this moment."""
        self._stall.restart(now)
        self._hang.restart(now)

    def check(
        self, updates: int, status: Mapping[str, float], now: float, hanging: str = ""
    ) -> str | None:
        """Returns a warning if one is due, else None.

        updates: of this part of the run.
        hanging: the source's description of workers that hang; empty if none does.
        """
        if updates != self._updates:
            self._updates, self._lost = updates, _lost(status)
            self._stall.restart(now)
        if not hanging:
            self._hang.restart(now)
        if (seconds := self._stall.due(now)) is None:
            return hanging if self._hang.due(now) is not None else None
        self._hang.delay(now)
        figures = ", ".join(f"{name} {value}" for name, value in status.items())
        suspect = self._suspect(status, _lost(status) - self._lost, hanging)
        return f"nothing was learnt for {seconds:.0f} s: {suspect} ({figures})"

    def _suspect(self, status: Mapping[str, float], lost: int, hanging: str) -> str:
        """Describes the probable cause; lost: streams or actors lost since the last update."""
        collectors, count = alive(status)
        rollouts = status.get("learner_queue_size", 0)
        if f"live_{collectors}" not in status:  # of workers that have collected nothing yet
            return hanging or "no worker has collected a batch"
        if count == 0:
            return hanging or _NONE_ALIVE[collectors]
        if rollouts >= self._batch_size:
            return "rollouts wait in the learner queue, and the learner does not take them"
        few = f"{rollouts:g} of {self._batch_size} rollouts of a batch are there"
        if status.get("rollout_queue_size", 0) > 0:
            return f"{few}: others wait, and the learner gives no batch back"
        if status.get("inference_queue_size", 0) > 0:
            return f"{few}: observations wait, and the policy does not answer them"
        return f"{few}: {hanging or self._what_is_slow(status, lost)}"

    def _what_is_slow(self, status: Mapping[str, float], lost: int) -> str:
        collectors, count = alive(status)
        if lost:
            return f"{_losses(collectors, lost)} before a rollout is whole"
        if status.get("waiting_actors") == count:
            return "every actor waits for the weights of an update that does not end"
        if status.get("replay_fill", 0) > 0 and self._updates == 0:
            return "steps are collected for the replay, which is too small yet to learn from"
        return "the environments have not filled a rollout"


def _lost(status: Mapping[str, float]) -> int:
    """Returns how many streams broke, or actors died, so far."""
    return int(status.get(_LOST[alive(status)[0]], 0))


def _losses(collectors: str, lost: int) -> str:
    happened = (
        "were lost and connected again" if collectors == "streams" else "died and were replaced"
    )
    return f"{lost} {collectors} {happened}"
