# SPDX-License-Identifier: Apache-2.0
"""The scores of a run's evaluations, evaluations.csv, and the best of its checkpoints.

The best checkpoint is kept before the row is written. If the process is killed in between, the
checkpoint is evaluated again when the evaluation is resumed.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from torchbeast.errors import UsageError, refusing_paths
from torchbeast.fleets.waiting import warn
from torchbeast.reporting.log_files import AppendedFile, WallTime, csv_line, drop_after, read_logs
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run.episodes import Episodes

COLUMNS = (
    *("_time", "step", "weights_crc32", "num_episodes", "distinct_episodes"),
    *("mean_episode_return", "min_return", "max_return", "mean_episode_length"),
)


WeightsId = tuple[int, int]
"""Learnt env steps and a CRC of the weights, which together identify the weights of a run.

A run that makes no progress writes the same weights again. A run that went back to an earlier
checkpoint writes different weights after the same number of steps.
"""


def weights_id_of(state: Mapping[str, torch.Tensor], step: int) -> WeightsId:
    """Returns the identity of a network's weights, its state dict, after `step` env steps."""
    crc32 = 0
    for _, tensor in sorted(state.items()):
        data: Any = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
        crc32 = zlib.crc32(data, crc32)
    return step, crc32


class Scores:
    """Appends rows to NAMEs.csv, and keeps the best checkpoint as NAME_best.tar.

    Used by one process at a time, and by one thread of it.

    best: mean return of the best checkpoint, -inf without one.
    """

    def __init__(
        self,
        folder: Path,
        name: str = checkpoints.EVALUATION,
        step: float = math.inf,
        best: float = -math.inf,
        keeps_best: bool = True,
    ) -> None:
        """Opens the file in a run's folder, or makes it.

        step: env steps of the checkpoint that the run resumes; later rows are dropped, as in
        logs.csv. best: score below which no checkpoint is the best. Raises UsageError if the file
        cannot be written, or if another process uses it, and as `checkpoint.kept_score`.
        """
        self._folder, self._name, self._keeps_best = folder, name, keeps_best
        self.best = max(best, checkpoints.kept_score(folder, name)) if keeps_best else best
        self._path = folder / f"{name}s.csv"
        with closing(self._locked()):
            drop_after(self._path, step, COLUMNS)  # may replace the file
        self._file = self._locked()
        rows = [row for row in read_logs(self._path) if len(row) == len(COLUMNS)]
        self._known = {(int(row["step"]), int(row["weights_crc32"])) for row in rows}
        self._time = WallTime(at_least=rows[-1]["_time"] if rows else -math.inf)

    def _locked(self) -> AppendedFile:
        with refusing_paths("make it writable"):
            file = AppendedFile(self._path)
        if not file.lock():
            file.close()
            raise UsageError(
                f"another process is evaluating this run and writing {self._path}: stop it; use "
                "either --mode test --follow or evaluations during training, not both"
            )
        return file

    def knows(self, weights: WeightsId) -> bool:
        """Returns whether the weights have been evaluated."""
        return weights in self._known

    def add(
        self, weights: WeightsId, played: Episodes, checkpoint: Callable[[], Mapping[str, Any]]
    ) -> str:
        """Keeps the checkpoint if it is the best, and appends a row; returns a message about it.

        Files that cannot be written are a warning. checkpoint: returns the weights' checkpoint;
        called if it is kept.
        """
        returns, lengths = played.returns, played.lengths
        message = (
            f"Step {weights[0]:,}: mean return {statistics.fmean(returns):.2f}, from "
            f"{min(returns):g} to {max(returns):g}; mean length {statistics.fmean(lengths):.0f}; "
            f"{played.distinct} of {len(returns)} episodes unique"
        )
        if self._keep(statistics.fmean(returns), checkpoint):
            message += f"; new best, saved as {self._name}_best.tar"
        self._known.add(weights)  # even if writing fails: they are not played again
        row = [round(self._time.now(), 3), *weights, len(returns), played.distinct]
        row += [statistics.fmean(returns), min(returns), max(returns), statistics.fmean(lengths)]
        try:
            heading = "" if self._file.size else csv_line(COLUMNS)
            self._file.append(heading + csv_line(row))
        except OSError as error:
            warn(f"no row was written to {self._path.name} ({error.strerror})")
        return message

    def _keep(self, score: float, checkpoint: Callable[[], Mapping[str, Any]]) -> bool:
        """Keeps a checkpoint if its score is the highest; returns whether it did."""
        if not score > self.best:  # nor is NaN
            return False
        path = checkpoints.best_path(self._folder, self._name)
        if self._keeps_best:
            try:
                checkpoints.save_best(path, checkpoint(), self._name, score)
            except OSError as error:
                warn(f"{path} was not written ({error.strerror})")
                return False
        self.best = score
        return self._keeps_best

    def close(self) -> None:
        """Closes the file. Do not call any method afterwards."""
        self._file.close()
