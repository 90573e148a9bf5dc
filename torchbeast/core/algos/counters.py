# SPDX-License-Identifier: Apache-2.0
"""The four counters of a run's progress."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Counters:
    """Counts from the start of the run, across restarts."""

    env_steps: int = 0
    """Collected steps; they determine the learning rate and the end of the run."""
    learnt_steps: int = 0
    """Steps learnt from; a step that is used twice counts twice."""
    optimiser_steps: int = 0
    """Changes of the weights."""
    version: int = 0
    """Updates, one per batch; after each the weights are published under this number."""

    def state_dict(self) -> dict[str, int]:
        """Returns the counters under the names used by all checkpoints."""
        return {
            "steps": self.env_steps,
            "version": self.version,
            "learnt_steps": self.learnt_steps,
            "optimiser_steps": self.optimiser_steps,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores `state_dict`; raises ValueError when steps or version is missing.

        Earlier checkpoints have only these two. When they were written, every step was learnt from
        once, with one optimiser step per batch.
        """
        if missing := {"steps", "version"} - set(state):
            raise ValueError(
                f"the checkpoint's scheduler_state_dict lacks {', '.join(sorted(missing))}: it was "
                "written by another program and can be tested, but not resumed"
            )
        self.env_steps, self.version = int(state["steps"]), int(state["version"])
        self.learnt_steps = int(state.get("learnt_steps", self.env_steps))
        self.optimiser_steps = int(state.get("optimiser_steps", self.version))
