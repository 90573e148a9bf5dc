# SPDX-License-Identifier: Apache-2.0
"""Errors in making an environment."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class EnvError(ValueError):
    """An environment that cannot be made; the message is one sentence for the user."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of a message that suggests the closest known names, or an empty string."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    close = get_close_matches(name.lower(), by_lower, n=3)
    return f"; did you mean {' or '.join(by_lower[match] for match in close)}?" if close else ""
