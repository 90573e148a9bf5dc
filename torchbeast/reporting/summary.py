# SPDX-License-Identifier: Apache-2.0
"""The summary at the end of a run: its results, its files, and the next commands."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from torchbeast.core.wording import typed
from torchbeast.reporting.display import clock
from torchbeast.reporting.progress import Progress


def summary(progress: Progress, steps_learnt: int, seconds: float) -> str:
    """Returns a sentence about the results.

    steps_learnt: learnt by this process, which may have resumed an earlier run.
    """
    mean = progress.mean_return()
    returns = (
        f"mean return {mean:.2f}{_length(progress)} over the last {len(progress.returns)} episodes"
        if not math.isnan(mean)
        else "no episode has ended yet"
    )
    rate = steps_learnt / seconds if seconds > 0 else 0.0
    return (
        f"Learnt {steps_learnt:,} steps in {clock(seconds)} ({rate:,.0f} steps/s), "
        f"{progress.step:,} in all; {returns}{_lag(progress)}."
    )


def _length(progress: Progress) -> str:
    """Returns the mean length as text; empty when an old checkpoint had returns only."""
    mean = progress.mean_length()
    return "" if math.isnan(mean) else f" and length {mean:.0f}"


def _lag(progress: Progress) -> str:
    if math.isnan(progress.max_lag):
        return ""
    return f"; the last policy lag was {progress.mean_lag:.1f}, at most {progress.max_lag:.0f}"


def next_commands(
    program: str,
    folder: Path,
    has_checkpoint: bool,
    to_test: Sequence[str] = (),
    to_resume: Sequence[str] = (),
    learners: int = 1,
) -> str:
    """Returns where the files are, and the commands that plot, test and resume the run.

    to_test, to_resume: further words of these commands. learners: that torchrun started here.
    """
    python = Path(sys.executable).name
    run = f"{python} -m torchbeast.{program}"
    where = [*typed("--savedir", folder.parent), *typed("--xpid", folder.name)]
    commands = {"Plot it:": f"{python} -m torchbeast.plot {shlex.quote(str(folder))}"}
    if has_checkpoint:
        commands["Test it:"] = f"{run} --mode test {shlex.join([*where, *to_test])}"
        several = f"torchrun --nproc_per_node={learners} -m torchbeast.{program}"
        again = several if learners > 1 else run
        commands["Resume it:"] = f"{again} {shlex.join([*where, *to_resume])}"
    lines = [f"{what}\n  {command}" for what, command in commands.items()]
    return "\n".join([f"Its files are in {folder}", *lines])
