# SPDX-License-Identifier: Apache-2.0
"""What goes wrong before an environment exists."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class EnvError(ValueError):
    """An environment that cannot be made; the message is one sentence for the user."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Ends a message with the known names that are close to name, or with nothing."""
    by_lower = {candidate.lower(): candidate for candidate in sorted(known)}
    close = get_close_matches(name.lower(), by_lower, n=3)
    return f"; did you mean {' or '.join(by_lower[match] for match in close)}?" if close else ""
