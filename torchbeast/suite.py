# SPDX-License-Identifier: Apache-2.0
"""Trains an algorithm on every task of a suite with several seeds, and reports its scores.

python -m torchbeast.suite minatar --algo pqn --seeds 10
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro

from torchbeast import compare
from torchbeast.cli.command_line import parse_known
from torchbeast.core.base.checks import at_least
from torchbeast.errors import exit_code_of
from torchbeast.sweep.__main__ import sweep
from torchbeast.sweep.suites import suite
from torchbeast.sweep.table import Row

PROGRAM = "suite"


@dataclass(frozen=True, kw_only=True)
class SuiteFlags:
    """Trains an algorithm on every task of a suite with several seeds, and reports its scores.

    All other flags go to the sweep that trains the runs (python -m torchbeast.sweep --help), and
    from there to its program. The same command continues an interrupted suite.
    """

    suite: Annotated[str, tyro.conf.Positional]
    """minatar, classic, atari-5, mujoco-3, or a .json file with the environments, and presets by
    algorithm: {"envs": ["MinAtar/Breakout-v1"], "presets": {"ppo": ["minatar-breakout-ppo"]}}."""
    algo: str
    """The algorithm, such as impala or pqn. Its settings come from the suite, or from --preset."""
    preset: str | None = None
    """Settings for all tasks, in place of the suite's."""
    seeds: int = 10
    """Number of runs of each task."""
    first_seed: int = 1
    """The seed of the first run; the others follow."""
    name: str | None = None
    """The folder in --savedir. Default: the suite and the algorithm, as in minatar-pqn."""

    def __post_init__(self) -> None:
        at_least(1, seeds=self.seeds)
        at_least(0, first_seed=self.first_seed)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 when done or stopped, 1 if a run failed, 2 on wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(argv))


def run(argv: Sequence[str] | None) -> int:
    """Trains the runs, and reports their scores; returns the exit code."""
    flags, words = parse_known(SuiteFlags, PROGRAM, argv)
    seeds = ",".join(str(flags.first_seed + number) for number in range(flags.seeds))
    tasks = suite(flags.suite).words(flags.algo, flags.preset)
    algo = [] if flags.preset is None else [f"--algo={flags.algo}"]
    name = flags.name or f"{Path(flags.suite).stem}-{flags.algo}"
    command = ["--set", f"seed={seeds}", *tasks, *algo, "--name", name, *words]
    return sweep(command, PROGRAM, _report)[1]


def _report(rows: Sequence[Row], folder: Path) -> None:
    if all(math.isnan(row.figures.mean_return) for row in rows):
        return
    output = [folder / "suite.json", *([folder / "suite.png"] if find_spec("matplotlib") else [])]
    compare.run(compare.CompareFlags(runs=(str(folder),), output=tuple(output)))
    print(f"These figures and the curves are in {' and '.join(map(str, output))}")


if __name__ == "__main__":
    sys.exit(main())
