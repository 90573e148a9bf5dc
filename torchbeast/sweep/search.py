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
from collections.abc import Sequence
from typing import Any, Literal

from torchbeast.errors import UsageError

Search = Literal["sobol", "random"]
Values = dict[str, list[str]]

SEED = "seed"

_MOVE = 0.1  # share of a range


def values_of(words: Sequence[str]) -> Values:
    """Returns the values of --set by their flags; raises UsageError if they are invalid."""
    values_by_flag: Values = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.replace("-", "_")
        if not equals or not key.isidentifier():
            raise UsageError(
                f"--set takes flags with their values, such as learning_rate=0.0003,0.0006, "
                f"got {word!r}"
            )
        if key in values_by_flag:
            raise UsageError(f"--set has {key} twice: set it once, with all its values")
        values = _split(text)
        if not all(values) or len({*values}) < len(values):
            raise UsageError(f"--set {word} has an empty value or one value twice: remove it")
        values_by_flag[key] = values
    return values_by_flag


def _split(text: str) -> list[str]:
    """Returns the values between commas; commas within brackets are part of a value."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in ")}]")
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def settings_of_agents(values: Values, trials: int | None, search: Search) -> list[dict[str, str]]:
    """Returns the settings of all agents, by their flags.

    Args:
        values: The values of each flag, or its range as the only value.
        trials: Number of settings to draw, each of which is combined with every seed. None: all
            combinations.
        search: How to draw them. A sweep that continues draws the same ones.

    Raises:
        UsageError: If there is a range without trials, or trials without a setting to draw.
    """
    drawn = {key: choices for key, choices in values.items() if key != SEED}
    if trials is not None and not drawn:
        raise UsageError(
            f"--trials {trials} draws settings, but --set has only {SEED}: remove --trials, or add "
            "a setting to --set"
        )
    if trials is None:
        for key, choices in values.items():
            if _range(choices) is not None:
                raise UsageError(
                    f"--set {key}={choices[0]} is a range: add --trials, the number of settings to "
                    "sample from it, or use single values"
                )
        return [
            dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())
        ]
    seeds = [{SEED: seed} for seed in values.get(SEED, ())] or [{}]
    settings = [
        {key: value_at(drawn[key], share) for key, share in zip(drawn, point, strict=True)}
        for point in _points(trials, len(drawn), search)
    ]
    distinct = {tuple(trial.items()): trial for trial in settings}.values()  # of short lists
    return [{**trial, **seed} for trial in distinct for seed in seeds]


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
    return points.tolist()


def value_at(values: Sequence[str], share: float) -> str:
    """Returns the value at a share in [0, 1) of a range, on its scale, or of a list."""
    ends = _range(values)
    if ends is None:
        return values[int(share * len(values))]
    low, high = ends
    is_whole = _is_whole(values)
    high += is_whole  # the last whole number too
    value = low * (high / low) ** share if low > 0 else low + share * (high - low)
    return str(math.floor(value)) if is_whole else _text(value, low, high)


def moved(values: Sequence[str], value: str, direction: int) -> str:
    """Returns a value a tenth of the range further up or down on its scale, or the next or the
    previous value of a list; direction: 1 or -1.
    """
    ends = _range(values)
    if ends is None:
        place = values.index(value) + direction
        return values[min(max(place, 0), len(values) - 1)]
    (low, high), old = ends, float(value)
    by = _MOVE * direction
    new = old * (high / low) ** by if low > 0 else old + (high - low) * by
    if _is_whole(values):
        new = old + direction * max(1, round(abs(new - old)))
    new = min(max(new, low), high)
    return f"{new:.0f}" if _is_whole(values) else _text(new, low, high)


def _text(value: float, low: float, high: float) -> str:
    """Formats a value with four digits, or more if the range is narrower than its numbers.

    A value that these digits would round out of the range becomes its end.
    """
    more = math.floor(math.log10(max(abs(low), abs(high)) / (high - low)))
    text = f"{value:.{4 + max(0, more)}g}"
    inside = min(max(float(text), low), high)
    return text if inside == float(text) else repr(inside)


def position(values: Sequence[str], value: str) -> float:
    """Returns a value as a number to plot: its place in the list if it is not a number."""
    try:
        return float(value)
    except ValueError:
        return values.index(value)


def is_logarithmic(values: Sequence[str]) -> bool:
    """Returns whether values are a range on a logarithmic scale."""
    ends = _range(values)
    return ends is not None and ends[0] > 0


def _is_whole(values: Sequence[str]) -> bool:
    return all(end.lstrip("-").isdigit() for end in values[0].split(":"))


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
        raise UsageError(f"the range {values[0]} must be LOW:HIGH, with LOW below HIGH")
    return ends
