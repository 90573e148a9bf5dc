# SPDX-License-Identifier: Apache-2.0
"""The flags of the program: PolyBeast's, so that any run's settings can be measured.

The flags of the mode and of the run's folder are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import tyro

from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.cli.learner_flags import CommandFlags
from torchbeast.core.base.checks import above, at_least, require
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.config import CheckpointConfig, EvaluationConfig

_Group = TypeVar("_Group")


@dataclass(frozen=True, kw_only=True)
class MeasuringFlags:
    """Measurement."""

    seconds: float = 2.0
    """Length of one measurement. A slow update is not interrupted and may exceed it."""
    repeats: int = 3
    """Number of measurements of each stage, interleaved; the median is reported."""
    json: Path | None = None
    """JSON file for all measurements."""
    png: Path | None = None
    """PNG file for a bar chart."""
    hosts: int | None = None
    """Predict the steps/s of one learner with this many hosts, from the environments, inference and
    learning that are measured here. Each host is a machine like this one, with --num_envs."""
    link_gbit: float = 10.0
    """With --hosts: the learner's network connection, in Gbit/s."""

    def __post_init__(self) -> None:
        above(0, seconds=self.seconds)
        at_least(1, repeats=self.repeats, hosts=self.hosts)
        above(0, link_gbit=self.link_gbit)
        require(
            self.hosts is None or self.png is None,
            "--png is a chart of the stages, and --hosts prints a table: remove one of the two",
        )


Unused = tyro.conf.Suppress[tyro.conf.Fixed[_Group]]
"""A group of PolyBeast's flags that is not used here."""


@dataclass(frozen=True, kw_only=True)
class BenchFlags(PolyBeastFlags):
    """Measures each stage of PolyBeast, and PolyBeast end to end, and reports the bottleneck.

    Give it the settings of your run; it takes a minute or two."""

    command: Unused[CommandFlags] = field(default_factory=CommandFlags)
    run: Unused[RunConfig] = field(default_factory=RunConfig)
    checkpoints: Unused[CheckpointConfig] = field(default_factory=CheckpointConfig)
    evaluation: Unused[EvaluationConfig] = field(default_factory=EvaluationConfig)
    measuring: MeasuringFlags = field(default_factory=MeasuringFlags)
