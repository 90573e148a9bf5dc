# SPDX-License-Identifier: Apache-2.0
"""Agents for tests of sweeps, and the files that they would leave."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from torchbeast.reporting.log_files import LogFiles
from torchbeast.sweep.agents import AgentRun, name_of

Batch = tuple[int, int, float]  # step, episodes so far, mean return of those of the batch


def agent(folder: Path, total_steps: int = 100, **settings: str) -> AgentRun:
    name = name_of(settings)
    return AgentRun(
        name=name,
        settings=settings,
        program="monobeast",
        words=[],
        folder=folder / name,
        total_steps=total_steps,
        episodes=100,
        seed=None,
    )


def log(
    folder: Path, batches: Sequence[Batch], resumed_at: float = math.inf, **metrics: float
) -> None:
    """Writes a row for each batch, as a run does; resumed_at: the step of its checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    files = LogFiles(folder, resumed_at)
    for step, episodes, mean in batches:
        files.write(step, {"mean_episode_return": mean, "episodes": episodes, "x": 1.0, **metrics})
    files.close()


def finish(folder: Path, successful: bool = True) -> None:
    (folder / "meta.json").write_text(json.dumps({"successful": successful}))
