# SPDX-License-Identifier: Apache-2.0
"""The flags of the program: PolyBeast's, so that any run's settings can be measured, without those
that say what is done and where its files go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import tyro

from torchbeast.cli.flags import PolyBeastFlags, RunFlags


@dataclass(frozen=True, kw_only=True)
class MeasuringFlags:
    """How it is measured."""

    seconds: float = 2.0
    """Of one measurement. Updates are not cut: slow ones take longer."""
    repeats: int = 3
    """Measurements of each stage, in turn; the median counts."""
    json: Path | None = None
    """Also write every figure here."""
    png: Path | None = None
    """Also draw a bar chart here."""
    preset: str | None = None
    """Settings that belong together take the place of the defaults above; help lists them."""

    def __post_init__(self) -> None:
        if self.seconds <= 0:
            raise ValueError(f"--seconds must be greater than 0, but is {self.seconds}")
        if self.repeats < 1:
            raise ValueError(f"--repeats must be at least 1, but is {self.repeats}")


@dataclass(frozen=True, kw_only=True)
class BenchFlags(PolyBeastFlags):
    """Measures each stage of PolyBeast alone and the whole, in turn, and says what limits it. Give
    it the settings of your run; it takes a minute or two."""

    run: tyro.conf.Suppress[tyro.conf.Fixed[RunFlags]] = field(default_factory=RunFlags)
    measuring: MeasuringFlags = field(default_factory=MeasuringFlags)
