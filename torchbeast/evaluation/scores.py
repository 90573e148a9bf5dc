# SPDX-License-Identifier: Apache-2.0
"""The files that evaluations of a run write into its folder.

evaluations.csv   a row for each checkpoint
NAME_best.tar     the best checkpoint. Its entry callbacks[NAME]["best"] is its mean return, so that
                  later evaluations, by a Learner or by `--mode test --follow`, only replace it by a
                  better one
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchbeast.errors import UsageError, refusing_paths
from torchbeast.evaluation.play import Episodes
from torchbeast.reporting.log_files import (
    AppendedFile,
    WallTime,
    csv_line,
    end_last_line,
    read_logs,
)
from torchbeast.run import checkpoint as checkpoints

COLUMNS = (
    *("_time", "step", "weights_crc32", "num_episodes", "distinct_episodes"),
    *("mean_episode_return", "min_return", "max_return", "mean_episode_length"),
)


Weights = tuple[int, int]
"""Learnt env steps and a CRC of the weights, which together identify the weights of a run.

A run that makes no progress writes the same weights again. A run that went back to an earlier
checkpoint writes different weights after the same number of steps.
"""


def weights_of(checkpoint: Mapping[str, Any]) -> Weights:
    """Returns the identity of a checkpoint's weights."""
    crc32 = 0
    for _, tensor in sorted(checkpoint["model_state_dict"].items()):
        crc32 = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc32)
    return int(checkpoint["stats"].get("step", 0)), crc32


class Scores:
    """Appends rows to evaluations.csv. Used by one process at a time, and by one thread of it."""

    def __init__(self, folder: Path) -> None:
        """Opens the file in a run's folder, or makes it.

        Raises UsageError if it cannot be written, or if another process uses it.
        """
        path = folder / "evaluations.csv"
        with refusing_paths("make it writable"):
            self._file = AppendedFile(path)
        if not self._file.lock():
            self.close()
            raise UsageError(f"another process is evaluating this run and writing {path}: end it")
        end_last_line(path)
        rows = [row for row in read_logs(path) if len(row) == len(COLUMNS)]
        self._known = {(int(row["step"]), int(row["weights_crc32"])) for row in rows}
        self._time = WallTime(at_least=rows[-1]["_time"] if rows else -math.inf)

    def knows(self, weights: Weights) -> bool:
        """Returns whether the weights have been evaluated."""
        return weights in self._known

    def add(self, weights: Weights, played: Episodes) -> None:
        """Appends a row. If it cannot, raises OSError and leaves the file unchanged."""
        self._known.add(weights)  # even if writing fails: they are not played again
        heading = "" if self._file.size else csv_line(COLUMNS)
        returns, lengths = played.returns, played.lengths
        row = [round(self._time.now(), 3), *weights, len(returns), played.distinct]
        row += [statistics.fmean(returns), min(returns), max(returns), statistics.fmean(lengths)]
        self._file.append(heading + csv_line(row))

    def close(self) -> None:
        """Closes the file. Do not call any method afterwards."""
        self._file.close()


NAME = "evaluation"
BEST = "best"


def best_path(folder: Path, name: str = NAME) -> Path:
    """Returns the path of the best checkpoint, which need not exist."""
    return folder / f"{name}_best.tar"


def kept_score(folder: Path, name: str = NAME) -> float:
    """Returns the mean return of the best checkpoint, or -inf without a checkpoint.

    Raises UsageError or RunError if it cannot be read.
    """
    path = best_path(folder, name)
    if not path.exists():
        return -math.inf
    state = checkpoints.load(path, needed=()).get("callbacks", {}).get(name, {})
    return float(state.get(BEST, -math.inf))


def keep_if_better(folder: Path, checkpoint: Mapping[str, Any], score: float) -> bool:
    """Keeps a checkpoint as the best if its score is higher than the kept checkpoint's score.

    Returns whether it was. If it cannot be written, raises OSError and keeps the previous one.
    """
    if not score > kept_score(folder):  # nor is NaN
        return False
    states = {**checkpoint.get("callbacks", {}), NAME: {BEST: score}}
    checkpoints.save(best_path(folder), {**checkpoint, "callbacks": states})
    return True
