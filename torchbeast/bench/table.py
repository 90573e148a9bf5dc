# SPDX-License-Identifier: Apache-2.0
"""The figures as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.table import Table

from torchbeast.bench.limits import STAGES, Figure, cpu_sum, predict
from torchbeast.reporting.diagnosis import percent


def table(figures: Mapping[str, Figure], cores: int, title: str) -> Table:
    """A row for each figure, and what the stages together predict."""
    made = Table(title=title, title_justify="left")
    made.add_column("stage")
    for name in ("steps/s", "CPU us a step", "of all stages"):
        made.add_column(name, justify="right")
    for name, figure in figures.items():
        share = figure.cpu_us / cpu_sum(figures) if name in STAGES else math.nan
        made.add_row(name, *_numbers(figure), percent(share))
        if name == list(figures)[-2]:
            made.add_section()
    together = Figure(predict(figures, cores), cpu_sum(figures))
    made.add_row("predicted by the stages", *_numbers(together), percent(math.nan))
    return made


def _numbers(figure: Figure) -> tuple[str, str]:
    return _number(figure.steps_per_second), _number(figure.cpu_us)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
