# SPDX-License-Identifier: Apache-2.0
"""The flags of the program; all others are passed on to the program of the agents."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchbeast.sweep.config import SweepConfig


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    """Trains agents with every combination of some settings, and ranks them.

    All flags that are not below are those of the program of the agents, for all of them:
    python -m torchbeast.monobeast --help lists them.
    """

    sweep: SweepConfig = field(default_factory=SweepConfig)
