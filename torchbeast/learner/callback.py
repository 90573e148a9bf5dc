# SPDX-License-Identifier: Apache-2.0
"""The protocol of callbacks: what a Learner calls between its steps.

    Learner.step()    collect, learn, publish --> on_step of each --> the row of logs.csv
         first time:  on_start of each, before
         last time:   on_end of each, after, and then model.tar

A Learner calls them in the process and thread that calls its own methods, one after the other in
the order of its list, and never during an update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
