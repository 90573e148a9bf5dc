# SPDX-License-Identifier: Apache-2.0
"""The numbers of --info_keywords as log columns."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

from torchbeast.reporting.progress import mean

_log = logging.getLogger("torchbeast.learner")


class InfoMeans:
    """Means over games; says once for each keyword that a game had no such number."""

    def __init__(self, keywords: Sequence[str]) -> None:
        self._keywords = keywords
        self._missed: set[str] = set()

    def __call__(self, info: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Returns a column for each keyword, NaN without any number.

        info: the numbers of the games of an update, NaN where one gave none.
        """
        return {f"info_{name}": self._mean(name, info.get(name, ())) for name in self._keywords}

    def _mean(self, name: str, numbers: Sequence[float]) -> float:
        given = [number for number in numbers if not math.isnan(number)]
        if len(given) < len(numbers) and name not in self._missed:
            self._missed.add(name)
            _log.warning(
                "a game ended whose last info had no number %r: it was missing, or not a number; "
                "info_%s is the mean over the games that have one",
                name,
                name,
            )
        return mean(given)
