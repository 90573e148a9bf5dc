# SPDX-License-Identifier: Apache-2.0
"""Checks of settings; each raises ValueError with the field's name, its range and its value.

A value of None is a setting without a value, and passes.
"""

from __future__ import annotations

from collections.abc import Sequence


def require(holds: bool, sentence: str) -> None:
    """Raises ValueError with this sentence unless the condition holds."""
    if not holds:
        raise ValueError(sentence)


def at_least(minimum: float, **values: float | None) -> None:
    """Raises ValueError unless every value is `minimum` or more."""
    for name, value in values.items():
        holds = value is None or value >= minimum
        require(holds, f"{name} must be at least {minimum}, got {value}")


def above(limit: float, **values: float | None) -> None:
    """Raises ValueError unless every value is greater than `limit`."""
    for name, value in values.items():
        holds = value is None or value > limit
        require(holds, f"{name} must be greater than {limit}, got {value}")


def between(low: float, high: float, **values: float | None) -> None:
    """Raises ValueError unless every value is in [low, high]."""
    for name, value in values.items():
        holds = value is None or low <= value <= high
        require(holds, f"{name} must be between {low} and {high}, got {value}")


def one_of(choices: Sequence[str], **values: str) -> None:
    """Requires every value to be one of the choices."""
    for name, value in values.items():
        require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")
