# SPDX-License-Identifier: Apache-2.0
"""Checks that environments give finite numbers, so that a fault is found where it arises.

E is the number of environments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from torchbeast.core.envs.spaces import ObservationSpace, leaf_paths, leaves_in
from torchbeast.core.nest_py import flatten


class FiniteCheck:
    """Refuses NaN and infinity in the float leaves of observations.

    Each leaf of all environments is checked at once, which takes about 1 us where they are a few
    numbers. A number that is too large for the dtype of its leaf has become infinite.
    """

    def __init__(self, space: ObservationSpace) -> None:
        """space: of one environment's observations."""
        self._space = space
        leaves = enumerate(zip(flatten(space), leaf_paths(space, "observation"), strict=True))
        self._floats = [
            (index, path)
            for index, (spec, path) in leaves
            if spec.dtype.startswith("float") and math.prod(spec.shape)
        ]

    def __call__(
        self,
        rows: Sequence[np.ndarray],
        where: Callable[[int], str],
        given: Sequence[Any] | None = None,
    ) -> None:
        """Raises ValueError unless leaves [E, ...] are finite.

        where: names environment e and its step for the message. given: the observations that the
        environments returned, [E], if they are known; the message has their value.
        """
        for index, path in self._floats:
            finite = np.isfinite(rows[index])
            if not finite.item(finite.argmin()):  # half the time of finite.all()
                e, *entry = (int(i) for i in np.argwhere(~finite)[0])
                leaf = rows[index][e] if given is None else leaves_in(self._space, given[e])[index]
                raise ValueError(
                    f"{where(e)}: expected finite {rows[index].dtype} in the {path}, got "
                    f"{np.asarray(leaf)[tuple(entry)]}{f' at {entry}' if entry else ''}"
                )


def check_rewards(reward: np.ndarray, env_id: str) -> None:
    """Raises ValueError unless the rewards [E] are finite."""
    for index in np.flatnonzero(~np.isfinite(reward)):
        raise ValueError(
            f"environment {index} of {env_id}: expected a finite reward, got {reward[index]}"
        )
