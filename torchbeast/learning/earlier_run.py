# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint of an earlier run of the same name decides of a run that resumes it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchbeast.core.algos.optimiser_step import OptimiserStep
from torchbeast.core.losses import RewardClipping
from torchbeast.errors import UsageError
from torchbeast.learning import checkpoint as checkpoints
from torchbeast.reporting.progress import Progress


class EarlierRun:
    """The run that is resumed; without a checkpoint every answer is a new run's."""

    def __init__(self, path: Path | None = None) -> None:
        """path: of the checkpoint, which need not exist."""
        self._path = Path() if path is None else path
        self._saved = None if path is None or not path.exists() else checkpoints.load(path)

    @property
    def recorded(self) -> Mapping[str, Any] | None:
        """The settings that it recorded; None without a checkpoint."""
        return None if self._saved is None else self._saved["flags"]

    def seed(self, asked: int | None) -> int:
        """What is asked for, else the recorded seed, else a random one."""
        if asked is not None:
            return asked
        recorded = None if self.recorded is None else self.recorded.get("seed")
        return secrets.randbits(31) if recorded is None else int(recorded)

    def model_name(self, asked: str) -> str:
        """What is asked for; the recorded network where that leaves it open, or is what was asked
        for then.
        """
        if self._saved is None or asked not in ("auto", self._saved["flags"].get("model")):
            return asked
        return checkpoints.model_name(self._saved)

    @property
    def reads_values(self) -> bool:
        """Whether the network reads leaves by what their space says of the values."""
        return self._saved is None or checkpoints.reads_values(self._saved)

    def reward_input(self, learnt_from: RewardClipping) -> RewardClipping:
        """As rewards are learnt from; in a run that is resumed as its weights know them."""
        return learnt_from if self._saved is None else checkpoints.reward_input(self._saved)

    def check_same_model(self, now: str) -> None:
        """UsageError for another network: weights of one may fit another that computes something
        else.
        """
        before = now if self._saved is None else checkpoints.model_name(self._saved)
        if now != before != "auto":
            raise UsageError(
                f"the run {self._name} learns with --model {before}, not {now}: "
                f"give --model {before}, or another --xpid"
            )

    def check_same_environment(self, now: str, others_serve: bool) -> None:
        """UsageError for another environment. others_serve: servers that run already decide it."""
        before = None if self.recorded is None else self.recorded.get("env")
        if before is not None and before != now:
            raise UsageError(
                f"the run {self._name} learns {before}, not {now}: "
                f"{'start servers of' if others_serve else 'give --env'} {before}, "
                "or give another --xpid"
            )

    def restore(self, step: OptimiserStep[Any]) -> None:
        """Puts what was learnt into `step`, and torch's generators as they were."""
        if self._saved is not None:
            checkpoints.resume(step, self._saved, self._path)

    def progress(self) -> Progress:
        """How far it was."""
        progress = Progress()
        if self._saved is not None:
            progress.load_state_dict(self._saved["stats"])
        return progress

    @property
    def _name(self) -> str:
        return self._path.parent.name
