# SPDX-License-Identifier: Apache-2.0
"""A table of the figures."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.table import Table

from torchbeast.bench.limits import REPLAY, STAGES, Figure, cpu_sum, predict
from torchbeast.reporting.diagnosis import percent


def table(figures: Mapping[str, Figure], cores: int, title: str) -> Table:
    """Returns a row per figure, and the prediction of all stages together."""
    made = Table(title=title, title_justify="left")
    made.add_column("stage")
    for name in ("steps/s", "CPU us per step", "share of stages"):
        made.add_column(name, justify="right")
    for name, figure in figures.items():
        is_stage = name in (*STAGES, REPLAY)
        share = figure.cpu_us / cpu_sum(figures) if is_stage else math.nan
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
