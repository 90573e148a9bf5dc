# SPDX-License-Identifier: Apache-2.0
"""The settings of a sweep: all combinations of their values, or a number of trials.

    learning_rate=0.0003,0.001     two values
    learning_rate=0.0001:0.01      a range, from which --trials draws

A range whose ends are positive is drawn on a logarithmic scale, because most hyperparameters
matter by their ratio; any other range on a linear scale. A range of whole numbers gives whole
numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torchbeast.errors import UsageError

Search = Literal["sobol", "random"]
Values = dict[str, list[str]]

SEED = "seed"


def settings_of(values: Values, trials: int | None, search: Search) -> list[dict[str, str]]:
    """Returns the settings of all agents, by their flags.

    Args:
        values: The values of each flag, or its range as the only value.
        trials: Number of settings to draw, each of which is combined with every seed. None: all
            combinations.
        search: How to draw them. A sweep that continues draws the same ones.

    Raises:
        UsageError: If there is a range without trials.
    """
    drawn = {key: found for key, found in values.items() if key != SEED}
    if trials is None or not drawn:
        for key, found in values.items():
            if _range(found) is not None:
                raise UsageError(
                    f"--set {key}={found[0]} is a range: give --trials, the number of settings to "
                    "draw from it, or single values"
                )
        return [
            dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
        ]
    seeds = [{SEED: seed} for seed in values.get(SEED, ())] or [{}]
    settings = [
        {key: _at(drawn[key], share) for key, share in zip(drawn, point, strict=True)}
        for point in _points(trials, len(drawn), search)
    ]
    return [{**each, **seed} for each in _distinct(settings) for seed in seeds]


def _points(trials: int, dimensions: int, search: Search) -> list[list[float]]:
    """Returns points in [0, 1), which a Sobol sequence spreads more evenly than random numbers."""
    import torch  # takes a second

    if search == "random":
        numbers = torch.Generator().manual_seed(0)
        points = torch.rand(trials, dimensions, generator=numbers, dtype=torch.float64)
    else:
        engine: Any = torch.quasirandom.SobolEngine(  # type: ignore[no-untyped-call]
            dimensions, scramble=True, seed=0
        )
        points = engine.draw(trials, dtype=torch.float64)
    found: list[list[float]] = points.tolist()
    return found


def _at(values: Sequence[str], share: float) -> str:
    """Returns the value at a share in [0, 1) of a range or list."""
    ends = _range(values)
    if ends is None:
        return values[int(share * len(values))]
    low, high = ends
    is_whole = all(end.lstrip("-").isdigit() for end in values[0].split(":"))
    high += is_whole  # the last whole number too
    found = low * (high / low) ** share if low > 0 else low + share * (high - low)
    return str(math.floor(found)) if is_whole else f"{found:.4g}"


def _range(values: Sequence[str]) -> tuple[float, float] | None:
    """Returns the ends of a range, or None if the values are not one."""
    low, colon, high = values[0].partition(":")
    if len(values) > 1 or not colon:
        return None
    try:
        ends = float(low), float(high)
    except ValueError:  # such as my_module:MyAlgo
        return None
    if not (math.isfinite(ends[0]) and ends[0] < ends[1] < math.inf):
        raise UsageError(f"the range {values[0]} must be LOW:HIGH, with a number below another")
    return ends


def _distinct(settings: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Returns the settings without repetitions, which short lists of values lead to."""
    return list({tuple(each.items()): each for each in settings}.values())
