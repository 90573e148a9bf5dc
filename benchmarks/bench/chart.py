# SPDX-License-Identifier: Apache-2.0
"""A bar chart of the figures: steps/s of each stage, and the CPU time of a step in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.limits import REPLAY, STAGES, Figure, cpu_sum, predict
from torchbeast.errors import UsageError
from torchbeast.reporting.diagnosis import percent


def table(figures: Mapping[str, Figure], cores: int, title: str) -> Table:
    """Returns a row per figure, and the prediction of all stages together."""
    made = Table(title=title, title_justify="left")
    made.add_column("stage")
    for name in ("steps/s", "CPU us per step", "share of CPU time"):
        made.add_column(name, justify="right")
    for name, figure in figures.items():
        is_stage = name in (*STAGES, REPLAY)
        share = figure.cpu_us / cpu_sum(figures) if is_stage else math.nan
        made.add_row(name, *_numbers(figure), percent(share))
        if name == list(figures)[-2]:
            made.add_section()
    together = Figure(predict(figures, cores), cpu_sum(figures))
    made.add_row("predicted from the stages", *_numbers(together), percent(math.nan))
    return made


def _numbers(figure: Figure) -> tuple[str, str]:
    return _number(figure.steps_per_second), _number(figure.cpu_us)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def check(output: Path) -> None:
    """Raises UsageError when no chart can be written to `output`; called before measuring."""
    _figure_class()
    if not output.suffix == ".png":
        raise UsageError(f"--png {output} must end in .png")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UsageError(f"--png {output} cannot be written: use a file in a folder that exists")


def draw(figures: Mapping[str, Figure], cores: int, title: str, output: Path) -> None:
    """Writes the chart as a PNG."""
    figure = _figure_class()(figsize=(11, 4), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    rates, costs = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_rates(rates, figures, predict(figures, cores))
    _draw_costs(costs, figures)
    try:
        figure.savefig(output, dpi=150)
    except OSError as error:
        raise UsageError(f"--png {output} cannot be written: {error}") from None


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError:
        raise UsageError("--png needs matplotlib: pip install 'torchbeast[plot]'") from None
    return MatplotlibFigure


def _draw_rates(axes: Any, figures: Mapping[str, Figure], predicted: float) -> None:
    values = [figure.steps_per_second for figure in figures.values()]
    colors = ["C0" if name in STAGES else "gray" for name in figures]
    bars = axes.barh(list(figures), values, color=colors)
    axes.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3)
    axes.set_xscale("log")
    axes.set_xlim(_power_of_ten_below(min(values)), 3 * max(values))
    axes.invert_yaxis()
    axes.set_xlabel("steps/s, each alone")
    if not math.isnan(predicted):
        axes.axvline(predicted, linestyle="--", color="gray")
        axes.set_title(f"dashed: predicted {predicted:,.0f}", fontsize="small", loc="right")


def _power_of_ten_below(value: float) -> float:
    """Returns a power of ten of at most half the value, so that the shortest bar is visible."""
    return float(10 ** math.floor(math.log10(value / 2)))


def _draw_costs(axes: Any, figures: Mapping[str, Figure]) -> None:
    """Draws the costs of the stages as one stacked bar beside the end-to-end cost."""
    below = 0.0
    for name in STAGES:
        if name in figures and not math.isnan(figures[name].cpu_us):
            axes.bar("all stages", figures[name].cpu_us, bottom=below, label=name)
            below += figures[name].cpu_us
    for name, figure in figures.items():
        if name not in STAGES and not name.startswith("transport"):
            axes.bar(name, figure.cpu_us, color="gray")
    axes.set_ylabel("CPU us per step")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
