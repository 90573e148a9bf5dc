# SPDX-License-Identifier: Apache-2.0
"""The best checkpoint of a run by evaluation: NAME_best.tar, which says how good it is.

Its entry callbacks[NAME]["best"] is its mean return, as an `Evaluation` callback saves it. So the
next evaluation, by a Learner or by `--mode test --follow`, replaces it by a better one only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchbeast.learning import checkpoint as checkpoints

NAME = "evaluation"
_BEST = "best"


def path_of(folder: Path, name: str = NAME) -> Path:
    """Returns the path of the best checkpoint, which need not exist."""
    return folder / f"{name}_best.tar"


def kept_score(folder: Path, name: str = NAME) -> float:
    """Returns the mean return of the best checkpoint; -inf without one.

    Raises UsageError or RunError if it cannot be read.
    """
    path = path_of(folder, name)
    if not path.exists():
        return -math.inf
    return score_in(checkpoints.load(path, needed=()).get("callbacks", {}).get(name, {}))


def state_of(score: float) -> dict[str, Any]:
    """Returns the entry that says how good a checkpoint is."""
    return {_BEST: score}


def score_in(state: Mapping[str, Any]) -> float:
    """Returns the mean return of a `state_of`; -inf if it has none."""
    score: float = state.get(_BEST, -math.inf)
    return score


def keep_if_better(folder: Path, checkpoint: Mapping[str, Any], score: float) -> bool:
    """Makes a checkpoint the best if its score is higher than that of the one kept.

    Returns whether it was. Raises OSError if it cannot be written; the one before is kept then.
    """
    if not score > kept_score(folder):  # nor is NaN
        return False
    states = {**checkpoint.get("callbacks", {}), NAME: state_of(score)}
    checkpoints.save(path_of(folder), {**checkpoint, "callbacks": states})
    return True
