# SPDX-License-Identifier: Apache-2.0
"""Settings of what a run shows on the terminal."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.checks import at_least


@dataclass(frozen=True, kw_only=True)
class DisplayConfig:
    """Display in the terminal."""

    episodes_for_avg: int = 100
    """Number of the last episodes over which the mean return and length are shown."""
    suppress_logs: bool = False
    """Show no progress on the terminal, only the start, warnings and the summary. The files of the
    run are written as always."""

    def __post_init__(self) -> None:
        at_least(1, episodes_for_avg=self.episodes_for_avg)
