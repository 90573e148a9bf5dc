# SPDX-License-Identifier: Apache-2.0
"""Draws the figures of docs/results from the curves that are kept there, all in one style.

usage: PYTHONPATH=. python benchmarks/result_figures.py [NAME ...]

Without a name it draws all of them. A name is a key of FIGURES, such as pong/curve.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchbeast import plot

RESULTS = Path(__file__).parents[1] / "docs" / "results"
_COLUMNS = 3


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    lines: Mapping[str, str]
    """Files of runs by label: a pattern below docs/results."""
    returns: str = ""
    """The range of returns that the task allows."""
    marks: Mapping[str, float] = {}
    """Returns to compare with, by label."""
    is_clock: bool = False
    """Draws minutes instead of steps."""
    column: str = plot.RETURN
    """The column to draw. Only returns get a moving average."""


_PROGRAMS = ("MonoBeast", "PolyBeast", "RayBeast")


def _programs(folder: str) -> dict[str, str]:
    """Returns the kept runs of each program that has any."""
    patterns = {name: f"{folder}/{name.lower()}-[0-9]*.csv" for name in _PROGRAMS}
    return {name: pattern for name, pattern in patterns.items() if any(RESULTS.glob(pattern))}


def _replay(game: str, *names: str) -> dict[str, str]:
    return {_REPLAYS[name]: f"replay/{game}/{name}-[0-9][0-9].csv" for name in names}


_REPLAYS = {
    "no-replay": "no replay, batch 32",
    "no-replay-8": "no replay, batch 8",
    "ratio-1": "LASER, ratio 1",
    "ratio-2": "LASER, ratio 2",
    "ratio-4": "LASER, ratio 4",
    "ratio-7": "LASER, ratio 7",
    "replay-alone": "replay alone",
}
_CARTPOLE = "0 to 500"
_HALF_CHEETAH = Panel(
    "HalfCheetah-v5",
    {"SAC": "halfcheetah/sac-*.csv", "TD3": "halfcheetah/td3-*.csv"},
    marks={"Stable-Baselines3, seed 21, evaluated": 4376},
)
_SPREAD = ("ppo", "dppo", "dd-ppo", "a3c", "impala", "seed", "laser")

FIGURES: dict[str, Sequence[Panel]] = {
    "overview": [
        Panel("CartPole, PPO", {"MonoBeast": "cartpole-ppo/monobeast-*.csv"}, _CARTPOLE),
        Panel("Pong, IMPALA", {"PolyBeast": "pong/polybeast-1[123].csv"}, "-21 to 21"),
        Panel("Memory, IMPALA with an LSTM", _programs("memory"), "-1 to 1"),
        Panel(
            "MinAtar Breakout, IMPALA and LASER",
            _replay("breakout", "no-replay", "no-replay-8", "ratio-7"),
        ),
        _HALF_CHEETAH._replace(title="HalfCheetah, SAC and TD3", marks={}),
        Panel(
            "BitFlip, ten bits, DQN",
            {"with hindsight": "bitflip/hindsight-*.csv", "without": "bitflip/plain-*.csv"},
            "-10 to 0",
        ),
    ],
    "atari/four": [
        Panel(name, {"one agent": f"atari/four-{name.lower().replace(' ', '-')}-*.csv"})
        for name in ("Pong", "Breakout", "Space Invaders", "Qbert")
    ],
    "memory/tasks": [
        Panel(
            "CartPole without velocities",
            {"R2D2": "memory/hidden-r2d2-*.csv", "DQN": "memory/hidden-dqn-*.csv"},
            _CARTPOLE,
        ),
        Panel(
            "A cue 100 steps ago, PPO",
            {"GTrXL": "memory/delay-gtrxl-*.csv", "LSTM": "memory/delay-lstm-*.csv"},
            "-1 to 1",
        ),
        Panel(
            "MiniGrid's MemoryS7",
            {"R2D2": "memory/s7-r2d2-*.csv", "DQN": "memory/s7-dqn-*.csv"},
            "0 to 1",
        ),
        *(
            Panel(
                f"MinAtar {game.capitalize()}",
                {"R2D2": f"memory/{game}-r2d2-*.csv", "DQN": f"memory/{game}-dqn-*.csv"},
            )
            for game in ("breakout", "asterix")
        ),
    ],
    "cartpole/curve": [
        Panel("CartPole, IMPALA, entropy cost 0.01", _programs("cartpole"), _CARTPOLE)
    ],
    "cartpole-two-learners/curve": [
        Panel(
            "CartPole, IMPALA",
            {
                "two learners": "cartpole-two-learners/polybeast_learner-*.csv",
                "one learner": "cartpole/polybeast-*.csv",
            },
            _CARTPOLE,
        )
    ],
    "cleanrl/curve": [
        Panel(
            "CartPole, PPO with CleanRL's settings",
            {"MonoBeast": "cleanrl/ppo-*.csv"},
            _CARTPOLE,
            {"CleanRL's documentation: 488.75": 488.75},
        )
    ],
    "halfcheetah/sac": [_HALF_CHEETAH],
    "pong/curve": [Panel("Pong, IMPALA", _programs("pong"), "-21 to 21")],
    "pong/plain": [
        Panel(
            "Pong, IMPALA, seed 1",
            {"shallow-norm": "pong/polybeast-1.csv", "plain shallow-norm": "pong/plain-1.csv"},
            "-21 to 21",
        )
    ],
    "replay/breakout/curve": [
        Panel(
            "MinAtar Breakout",
            _replay("breakout", "no-replay", "no-replay-8", "replay-alone", "ratio-7"),
        ),
        Panel(
            "MinAtar Breakout, replay ratios",
            _replay("breakout", "ratio-1", "ratio-2", "ratio-4", "ratio-7"),
        ),
    ],
    "replay/spaceinvaders/curve": [
        Panel(
            "MinAtar Space Invaders",
            _replay("spaceinvaders", "no-replay", "no-replay-8", "replay-alone", "ratio-7"),
        )
    ],
    "schemes/curve": [
        Panel(f"CartPole, {name}", {name: f"schemes/{name}-[0-9]*.csv"}, _CARTPOLE)
        for name in _SPREAD
    ],
}


def main() -> None:
    """Draws the figures that are named, or all of them."""
    for name in sys.argv[1:] or FIGURES:
        print(draw(name))


def draw(name: str) -> Path:
    """Draws a figure of FIGURES and returns where it is."""
    panels = FIGURES[name]
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (8.0, 5.0) if len(panels) == 1 else (3.3 * columns, 2.9 * rows)
    output = RESULTS / f"{name}.png"
    with plot.figure_for([output], size if columns != 2 else (10.0, 4.5)) as figure:
        every = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(every, panels, strict=False):
            _draw_panel(axes, panel, is_small=columns == _COLUMNS)
        for axes in every[len(panels) :]:
            axes.set_axis_off()
        figure.supxlabel(plot.NOTE, fontsize="small")
    return output


def _draw_panel(axes: Any, panel: Panel, is_small: bool) -> None:
    lines = []
    for label, pattern in panel.lines.items():
        paths = sorted(RESULTS.glob(pattern))
        curves = {path: plot.curve(path, panel.is_clock, panel.column) for path in paths}
        lines.append((f"{label} (n={len(curves)})", plot.RunGroup({}, curves)))
    plot.draw(axes, lines, panel.title, panel.is_clock)
    axes.figure.legends[0].remove()  # each panel has its own
    for label, value in panel.marks.items():
        axes.axhline(value, color="black", linestyle=":", linewidth=1, label=label)
    returns = f" ({panel.returns})" if panel.returns else ""
    axes.set_ylabel(f"return{returns}" if is_small else f"mean episode return{returns}")
    if panel.is_clock:  # curves end anywhere
        axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.27))
    else:
        axes.legend(fontsize="x-small" if is_small else "medium")
    if is_small:
        axes.title.set_fontsize("medium")
        axes.xaxis.set_major_formatter("{x:,.10g}")
        axes.locator_params(axis="x", nbins=4)


if __name__ == "__main__":
    main()
