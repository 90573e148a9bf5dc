# SPDX-License-Identifier: Apache-2.0
"""The protocol of callbacks: what a Learner calls between its steps, and when one acts.

    Learner.step()    collect, learn, publish --> on_step of each --> the row of logs.csv
         first time:  on_start of each, before
         last time:   on_end of each, after, and then model.tar

A Learner calls them in the process and thread that calls its own methods, one after the other in
the order of its list, and never during an update.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchbeast.core.checks import require

if TYPE_CHECKING:
    from torchbeast.learner.learner import Learner


class Callback:
    """Something to do while a Learner trains. Subclasses override what they need.

    A callback may use the Learner that it is given, but not its `step`, `train`, `restore` and
    `close`; `Learner.stop` ends the run after the present step.

    An exception ends the run as one of an environment does: model.tar is written, workers end, and
    `Learner.step` raises a RunError that names the callback; a UsageError passes as it is. Ctrl-C
    in a callback does not: the update remains, and the next step goes on.
    """

    @property
    def name(self) -> str:
        """Name of its state in checkpoints; no two callbacks of a Learner have the same."""
        return type(self).__name__

    def on_start(self, learner: Learner) -> None:
        """Called before the first step of a Learner, and before the first after `restore`.

        The state of an earlier part of the run is loaded by then.
        """

    def on_step(self, learner: Learner, figures: dict[str, float]) -> None:
        """Called after every update.

        figures: the row of logs.csv, with what the callbacks before this one have added. Figures
            that are added are columns of their own, in every log; numbers only.
        """

    def on_end(self, learner: Learner) -> None:
        """Called once when a run that has started ends, however it ends, before model.tar is
        written; but not where a Learner is only forgotten, or its process ends.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs: tensors and plain values. Every checkpoint has it."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`. Called when a checkpoint is loaded that has such a state."""


class Schedule:
    """Says when the next time has come. Multiples of steps count from the beginning of the run,
    seconds from the time before.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the one that is not None."""
        require(
            (every_steps is None) != (every_seconds is None),
            f"give either every_steps or every_seconds, got {every_steps} and {every_seconds}",
        )
        every = every_steps if every_seconds is None else every_seconds
        assert every is not None
        require(every > 0, f"every_steps and every_seconds must be more than 0, got {every}")
        self._every = every
        self._in_steps = every_seconds is None
        self._clock = clock
        self._last = 0.0

    def mark(self, steps: int) -> None:
        """Waits from now on, after `steps` env steps of the run."""
        self._last = self._now(steps)

    def is_due(self, steps: int) -> bool:
        """Returns whether a multiple of steps was passed, or the seconds, since the last mark."""
        now, every = self._now(steps), self._every
        return now // every > self._last // every if self._in_steps else now - self._last >= every

    def _now(self, steps: int) -> float:
        return steps if self._in_steps else self._clock()
