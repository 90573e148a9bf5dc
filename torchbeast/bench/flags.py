# SPDX-License-Identifier: Apache-2.0
"""The flags of the program: PolyBeast's, so that any run's settings can be measured.

The flags of the mode and of the run's folder are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from torchbeast.cli.flags import PolyBeastFlags, RunFlags


@dataclass(frozen=True, kw_only=True)
class MeasuringFlags:
    """How to measure."""

    seconds: float = 2.0
    """Length of one measurement. A slow update is not interrupted and may exceed it."""
    repeats: int = 3
    """Number of measurements of each stage, interleaved; the median is reported."""
    json: Path | None = None
    """File to write every figure to, as JSON."""
    png: Path | None = None
    """File to draw a bar chart to, as PNG."""
    preset: str | None = None
    """Settings that replace the defaults above; the help lists the presets."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"--seconds must be greater than 0, got {self.seconds}")
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, got {self.repeats}")


@dataclass(frozen=True, kw_only=True)
class BenchFlags(PolyBeastFlags):
    """Measures each stage of PolyBeast alone and PolyBeast end to end, and names the bottleneck.

    Give it the settings of your run; it takes a minute or two."""

    run: tyro.conf.Suppress[tyro.conf.Fixed[RunFlags]] = field(default_factory=RunFlags)
    measuring: MeasuringFlags = field(default_factory=MeasuringFlags)
