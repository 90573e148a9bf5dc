# SPDX-License-Identifier: Apache-2.0
"""The earlier run that is resumed, and the settings that its checkpoint determines."""

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
    """The run that is resumed; without a checkpoint all answers are those of a new run."""

    def __init__(self, path: Path | None = None) -> None:
        """Reads the checkpoint at `path`, which need not exist."""
        self._path = Path() if path is None else path
        self._saved = None if path is None or not path.exists() else checkpoints.load(path)

    @property
    def recorded(self) -> Mapping[str, Any] | None:
        """The recorded settings; None without a checkpoint."""
        return None if self._saved is None else self._saved["flags"]

    def seed(self, asked: int | None) -> int:
        """Returns the seed asked for, else the recorded one, else a random one."""
        if asked is not None:
            return asked
        recorded = None if self.recorded is None else self.recorded.get("seed")
        return secrets.randbits(31) if recorded is None else int(recorded)

    def model_name(self, asked: str) -> str:
        """Returns the name of the network.

        It is the recorded one if `asked` is "auto" or the same as in the earlier run, else `asked`.
        """
        if self._saved is None or asked not in ("auto", self._saved["flags"].get("model")):
            return asked
        return checkpoints.model_name(self._saved)

    @property
    def reads_values(self) -> bool:
        """Whether the network uses bounds and categories of the observation space."""
        return self._saved is None or checkpoints.reads_values(self._saved)

    def reward_input(self, learnt_from: RewardClipping) -> RewardClipping:
        """Returns the clipping of the network's reward input; a resumed run keeps its own."""
        return learnt_from if self._saved is None else checkpoints.reward_input(self._saved)

    def check_same_model(self, now: str) -> None:
        """Raises UsageError for another network, even one with weights of the same shapes."""
        before = now if self._saved is None else checkpoints.model_name(self._saved)
        if now != before != "auto":
            raise UsageError(
                f"the run {self._name} learns with --model {before}, not {now}: "
                f"give --model {before}, or another --xpid"
            )

    def check_same_environment(self, now: str, others_serve: bool) -> None:
        """Raises UsageError for another environment.

        others_serve: whether running servers decide the environment.
        """
        before = None if self.recorded is None else self.recorded.get("env")
        if before is not None and before != now:
            raise UsageError(
                f"the run {self._name} learns {before}, not {now}: "
                f"{'start servers of' if others_serve else 'give --env'} {before}, "
                "or give another --xpid"
            )

    def restore(self, step: OptimiserStep[Any]) -> None:
        """Restores `step` and torch's random generators from the checkpoint."""
        if self._saved is not None:
            checkpoints.resume(step, self._saved, self._path)

    def progress(self) -> Progress:
        """Returns the progress of the earlier run; zero without a checkpoint."""
        progress = Progress()
        if self._saved is not None:
            progress.load_state_dict(self._saved["stats"])
        return progress

    @property
    def _name(self) -> str:
        return self._path.parent.name
