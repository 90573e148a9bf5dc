# SPDX-License-Identifier: Apache-2.0
"""How far a run is, in four numbers that say different things."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Counters:
    """All count from the start of the run, over restarts."""

    env_steps: int = 0
    """Steps that were collected. Learning rates and the end of the run go by it."""
    learnt_steps: int = 0
    """Steps that were learnt from, each as often as it was."""
    optimiser_steps: int = 0
    """How often the weights moved."""
    version: int = 0
    """Batches learnt: after each the weights are published under this number."""

    def state_dict(self) -> dict[str, int]:
        """Under the names that checkpoints have had from the start."""
        return {
            "steps": self.env_steps,
            "version": self.version,
            "learnt_steps": self.learnt_steps,
            "optimiser_steps": self.optimiser_steps,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores `state_dict`. Earlier checkpoints have two of the numbers: then every step was
        learnt from once, by one optimiser step a batch. ValueError when there are not even two.
        """
        if missing := {"steps", "version"} - set(state):
            raise ValueError(
                f"the checkpoint's scheduler_state_dict lacks {', '.join(sorted(missing))}: it was "
                "written by another program and can be tested, but not resumed"
            )
        self.env_steps, self.version = int(state["steps"]), int(state["version"])
        self.learnt_steps = int(state.get("learnt_steps", self.env_steps))
        self.optimiser_steps = int(state.get("optimiser_steps", self.version))
