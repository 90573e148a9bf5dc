# SPDX-License-Identifier: Apache-2.0
"""The progress of a run, its display, and its summary.

The display is a live panel on a terminal, or plain lines. The summary at the end has the results,
the files, and the next commands.
"""

from __future__ import annotations

import collections
import logging
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar

from rich.console import Console, ConsoleRenderable, Group, RenderableType
from rich.constrain import Constrain
from rich.control import Control
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.segment import ControlType, Segment
from rich.table import Column, Table
from rich.text import Text

from torchbeast.collect.contract import LostStream, since
from torchbeast.core.base.checks import command, interpreter, typed
from torchbeast.reporting.diagnosis import UNKNOWN, Diagnosis, Shares, alive, percent


@dataclass
class Progress:
    """Steps and episodes of a run. Written under the training lock.

    by_task: returns of the last episodes of each task, by name; {} with one task.
    score: of an agent with these mean returns, by the numbers of tasks.
    """

    step: int = 0
    episodes: int = 0
    returns: collections.deque[float] = field(default_factory=collections.deque)
    lengths: collections.deque[int] = field(default_factory=collections.deque)
    by_task: dict[str, collections.deque[float]] = field(default_factory=dict)
    score: Callable[[Mapping[int, float]], float] = lambda returns: mean(returns.values())

    def keep_last(self, episodes: int, tasks: Sequence[str] = ()) -> None:
        """Changes the number of episodes in the means; tasks: the names of several."""
        self.returns = collections.deque(self.returns, episodes)
        self.lengths = collections.deque(self.lengths, episodes)
        self.by_task = {
            name: collections.deque(self.by_task.get(name, ()), episodes) for name in tasks
        }

    def mean_return(self) -> float:
        """Returns the mean return of the last episodes, with several tasks the score of the mean
        returns of those with episodes; NaN if none has ended.
        """
        if not self.by_task:
            return mean(self.returns)
        means = {number: mean(returns) for number, returns in enumerate(self.by_task.values())}
        known = {number: value for number, value in means.items() if not math.isnan(value)}
        return self.score(known) if known else math.nan

    def task_means(self) -> dict[str, float]:
        """Returns the mean return of each task's last episodes, by name; {} with one task."""
        return {name: mean(returns) for name, returns in self.by_task.items()}

    def mean_length(self) -> float:
        """Returns the mean length of the last episodes in env steps; NaN if none has ended."""
        return mean(self.lengths)

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress as plain numbers."""
        by_task = {name: list(returns) for name, returns in self.by_task.items()}
        return {
            "step": self.step,
            "episodes": self.episodes,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            **({"task_returns": by_task} if by_task else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict`; entries missing in a checkpoint start from zero."""
        self.step = state.get("step", 0)
        self.episodes = state.get("episodes", 0)
        self.returns = collections.deque(state.get("returns", ()))  # `keep_last` limits them
        self.lengths = collections.deque(state.get("lengths", ()))
        for name, returns in state.get("task_returns", {}).items():
            self.by_task[name] = collections.deque(returns)


def mean(values: Iterable[float]) -> float:
    """Returns the mean, or NaN without values. Copies them, because the learner may add some."""
    recent = list(values)
    return statistics.fmean(recent) if recent else math.nan


class _Frame(Live):
    """A live display that leaves nothing of the last frame behind if the terminal is resized.

    A narrower terminal has wrapped the lines of the last frame, so that they fill more rows than
    `Live` erases.
    """

    _lengths: Sequence[int] = ()  # of the lines of the last frame

    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        """Erases the additional rows, and renders."""
        console = self.console
        extra = sum(max(0, length - 1) // console.width for length in self._lengths)
        lines = console.render_lines(self.get_renderable(), pad=False)[: console.height]
        self._lengths = [Segment.get_line_length(line) for line in lines]
        erase: tuple[Any, Any] = ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)
        up = Control(*erase, *[(ControlType.CURSOR_UP, 1), erase[1]] * extra)
        return [*([up] if extra else []), *super().process_renderables(renderables)]


PanelT = TypeVar("PanelT", bound="Panel")


class Panel:
    """A display. The subclass draws or prints its contents. Used by the main thread, as a context
    manager.
    """

    def __init__(self, stream: TextIO | None, is_shown: bool = True) -> None:
        """Prepares drawing if the stream is a terminal; None: stdout.

        is_shown: whether to draw on a terminal.
        """
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream)
        is_live = self._console.is_interactive and self._stream.isatty() and is_shown
        self._live = _Frame(console=self._console, auto_refresh=False) if is_live else None

    def __enter__(self: PanelT) -> PanelT:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self, content: RenderableType) -> bool:
        """Draws on the terminal. Without a terminal, does nothing and returns False."""
        if self._live is None:
            return False
        self._live.update(Constrain(content, self._width), refresh=True)
        return True

    @property
    def _width(self) -> int:
        """The width of a frame. It leaves room for the ^C that a terminal shows at its end, and
        that would otherwise begin another line.
        """
        return self._console.width - 2

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def line_of(cells: Mapping[str, str]) -> str:
    """Returns metrics with their names, in one line."""
    return "  ".join(f"{name} {value}" for name, value in cells.items())


def table_of(title: str, columns: Iterable[str]) -> Table:
    """Returns an empty table of metrics."""
    headers = [Column(name, justify="right") for name in columns]
    return Table(*headers, title=escape(title), title_justify="left")


def print_table(table: Table) -> None:
    """Prints a table as wide as the terminal, or up to _WIDE columns if there is none."""
    console = Console()
    (console if console.is_terminal else Console(width=_WIDE)).print(table)


_log = logging.getLogger("torchbeast.display")

# Columns of the panel, the most important ones first, and their widths.
_COLUMNS = {
    **{"mean return": 11, "episodes": 9, "steps/s": 8, "lag": 8, "length": 6, "loss": 9},
    **{"queue": 5, "workers": 7, "streams": 7, "replay": 22},
}
_GAP = 2  # between columns
_WIDE = 200  # columns of a table that is not on a terminal
_PLAIN_EVERY_S = 5.0
_SAID_EVERY_S = 30.0  # between two diagnoses, because a balanced run would alternate
_OF_LOSSES = ("lost", "ending")  # diagnoses that are reported immediately


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The state of a run at one moment, for its display and its metrics."""

    progress: Progress
    total_steps: int
    status: Mapping[str, float]  # of the source
    lost_streams: Sequence[LostStream] = ()  # lost streams
    shares: Shares = UNKNOWN
    diagnosis: Diagnosis | None = None  # None: unknown yet
    run: str = ""  # name of the run
    updates: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)  # since the start
    row: Mapping[str, float] = field(default_factory=dict)  # last row of the log
    saved_at: float = math.nan  # Unix time of the last checkpoint of this process; NaN: none yet
    failed_saves: int = 0
    learnt_here: int = 0  # env steps, by this process
    took: float = math.nan  # seconds until the last update; NaN: the run has not ended

    @property
    def collected(self) -> int:
        """Env steps collected since the program started."""
        return int(self.status.get("collected_steps", 0))


class Rate:
    """Steps per second over the last ten seconds, or the last ten updates if they take longer."""

    def __init__(self) -> None:
        self._points: collections.deque[tuple[float, int]] = collections.deque(maxlen=11)

    def add(self, step: int, now: float) -> float:
        """Adds a point, unless the step is the last one's or that is newer than 0.9 s; returns the
        rate at `now`, which is 0 for the first point.
        """
        is_new = not self._points or step != self._points[-1][1]
        if is_new and (not self._points or now - self._points[-1][0] >= 0.9):
            self._points.append((now, step))
        before, step_then = self._points[0]
        last = self._points[-1][0]
        if now - last > max(10.0, last - before):  # longer than all these updates
            return 0.0
        return (step - step_then) / (now - before) if before < now else 0.0


class Display(Panel):
    """Displays the metrics of a run. Used by the main thread, as a context manager."""

    def __init__(
        self, title: str, stream: TextIO | None = None, only_warnings: bool = False
    ) -> None:
        super().__init__(stream, is_shown=not only_warnings)
        self._only_warnings = only_warnings
        self._title = title
        self._rate = Rate()
        self._last_line = self._last_said = -math.inf
        self._said: str | None = None  # the limit reported last
        self._step = self._collected = 0  # on the last line
        self._widths = dict(_COLUMNS)  # they never shrink, so that columns do not move

    def show(self, shown: Shown, now: float | None = None) -> None:
        """Updates the display; call it about once a second."""
        now = time.monotonic() if now is None else now
        rate = self._rate.add(shown.progress.step, now)
        cells = _cells(shown, rate if math.isnan(shown.took) else shown.learnt_here / shown.took)
        has_lines = not (self._only_warnings or self._draw(self._frame(cells, shown)))
        is_time = now - self._last_line >= _PLAIN_EVERY_S or self._began(shown)
        if is_time and math.isnan(shown.took):  # after the end, the summary follows
            self._last_line, self._step, self._collected = now, shown.progress.step, shown.collected
            news = self._news(shown, now)
            for line in [line_of(cells), *news] if has_lines else []:
                self._print(line)

    def _frame(self, cells: Mapping[str, str], shown: Shown) -> Group:
        """Lays out as many metrics as fit next to each other, the progress, and the diagnosis."""
        cells, below = dict(cells), list[str]()
        collectors, live = alive(shown.status)
        if cells[collectors] != str(live):  # too long for a column
            below.append(f"{collectors}: {cells[collectors]}")
            cells[collectors] = cells[collectors].partition(",")[0]
        if shown.diagnosis is not None and math.isnan(shown.took):
            below += [*str(shown.shares).split("; "), shown.diagnosis.sentence]
        below += [f"{task}: {figure(r)}" for task, r in shown.progress.task_means().items()]
        table, row, used = Table(box=None, pad_edge=False), list[str](), 0
        for name in filter(cells.__contains__, self._widths):
            self._widths[name] = width = max(self._widths[name], len(cells[name]))
            used += width + _GAP
            if used - _GAP <= self._width:
                table.add_column(name, justify="right", min_width=width)
                row.append(cells[name])
        table.add_row(*row)
        return Group(Text(self._title), table, _bar(cells, shown), *map(Text, below))

    def _began(self, shown: Shown) -> bool:
        """Returns whether the first steps or the first update just came, and deserve a line."""
        return self._step == 0 < shown.progress.step or self._collected == 0 < shown.collected

    def _news(self, shown: Shown, now: float) -> list[str]:
        """Returns a diagnosis if it differs from the last one. A lost stream is reported
        immediately, and logged, because nobody may be looking.
        """
        found = shown.diagnosis
        if self._said in _OF_LOSSES and not shown.lost_streams:
            self._said = None  # the next lost stream is a new event
            _log.info("no lost streams remain; %d are connected", alive(shown.status)[1])
        if found is None or found.limit == self._said:
            return []
        if now - self._last_said < _SAID_EVERY_S and found.limit not in _OF_LOSSES:
            return []
        self._said, self._last_said = found.limit, now
        if found.limit in _OF_LOSSES:
            _log.info("%s", found.sentence)
        return [found.sentence]


def _cells(shown: Shown, rate: float) -> dict[str, str]:
    """Returns each metric as text; unknown ones are a dash."""
    progress = shown.progress
    loss, mean_lag, max_lag, relevant_share = (
        shown.row.get(name, math.nan)
        for name in ("total_loss", "mean_lag", "max_lag", "relevant_share")
    )
    left = (shown.total_steps - progress.step) / rate if rate > 0 else math.nan
    collectors, live = alive(shown.status)
    fill = shown.status.get("replay_fill")
    relevant = "" if math.isnan(relevant_share) else f", {percent(relevant_share)} relevant"
    is_first = math.isnan(loss)  # no other metric changes before the first update
    return {
        "steps": f"{progress.step:,} of {shown.total_steps:,}",
        **({"collected": f"{shown.collected:,}"} if is_first and shown.collected else {}),
        "steps/s": f"{rate:,.0f}",
        "left": clock(left),
        "episodes": f"{progress.episodes:,}",
        "mean return": figure(progress.mean_return()),
        "length": figure(progress.mean_length(), ".0f"),
        "loss": figure(loss),
        "lag": "/".join([figure(mean_lag, ".1f"), figure(max_lag, ".0f")]),
        "queue": f"{shown.status['learner_queue_size']:.0f}",
        **({} if fill is None else {"replay": f"{percent(fill)}{relevant}"}),
        collectors: _alive(shown, live),
    }


def _alive(shown: Shown, live: int) -> str:
    """Returns how many are alive: "4", or "2 of 4, 1 lost 12 s ago, 1 retired"."""
    retired = int(shown.status.get("retired_streams", 0))
    others = (
        [f"{len(shown.lost_streams)} {since(shown.lost_streams)}"] if shown.lost_streams else []
    )
    others += [f"{retired} retired"] if retired else []
    total = live + len(shown.lost_streams) + retired
    return ", ".join([f"{live} of {total}", *others]) if others else f"{live}"


def clock(seconds: float) -> str:
    """Formats seconds as 1:02:03; NaN, and what timedelta cannot hold, as a dash."""
    is_known = seconds < timedelta.max.total_seconds()
    return str(timedelta(seconds=int(max(0.0, seconds)))) if is_known else "-"


def figure(value: float, spec: str = ".2f") -> str:
    """Formats a number; NaN as a dash."""
    return "-" if math.isnan(value) else format(value, spec)


def _bar(cells: Mapping[str, str], shown: Shown) -> Table:
    """Returns the line with the progress and the time left, as wide as the terminal."""
    step, total = shown.progress.step, shown.total_steps
    left = f"{cells['left']:>8} left"
    if "collected" in cells:  # no time is known yet
        left = f"{cells['collected']} collected"
    elif not math.isnan(shown.took):
        left = f"in {clock(shown.took)}"
    steps = f"{step:>{len(f'{total:,}')},} of {total:,} steps"
    columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), Column(no_wrap=True)
    line = Table.grid(*columns, padding=(0, 2, 0, 0), expand=True)
    line.add_row(f"{min(1.0, step / total):4.0%}", ProgressBar(total, step), steps, left)
    return line


def summary(progress: Progress, steps_learnt: int, seconds: float) -> str:
    """Returns a summary of the results, in two lines.

    steps_learnt: by this process, which may have resumed an earlier run.
    """
    length = figure(progress.mean_length(), ".0f")
    returns = (
        f"Mean return {progress.mean_return():.2f} and length {length} over the last "
        f"{len(progress.returns)} episodes."
        if progress.returns
        else "No episode has ended yet."
    )
    for task, value in progress.task_means().items():
        returns += f"\n{task}: mean return {figure(value)}"
    rate = steps_learnt / seconds if seconds > 0 else 0.0
    return (
        f"Trained for {steps_learnt:,} steps in {clock(seconds)} ({rate:,.0f} steps/s), "
        f"{progress.step:,} in total.\n{returns}"
    )


def next_commands(
    program: str,
    folder: Path,
    has_checkpoint: bool,
    to_test: Sequence[str] = (),
    to_resume: Sequence[str] = (),
    learners: int = 1,
) -> str:
    """Returns the folder of the files, and the commands that plot, test and resume the run.

    to_test, to_resume: further words of these commands. learners: number of learners that torchrun
    started here.
    """
    run = command(program)
    where = [*typed("--savedir", folder.parent), *typed("--xpid", folder.name)]
    commands = {"To plot:": f"{command('plot')} {shlex.quote(str(folder))}"}
    if has_checkpoint:
        commands["To test:"] = f"{run} --mode test {shlex.join([*where, *to_test])}"
        several = f"-m torch.distributed.run --nproc_per_node={learners} -m torchbeast.{program}"
        again = f"{interpreter()} {several}" if learners > 1 else run
        commands["To resume:"] = f"{again} {shlex.join([*where, *to_resume])}"
    lines = [f"{what}\n  {command}" for what, command in commands.items()]
    return "\n".join([f"Saved to {folder}", *lines])
