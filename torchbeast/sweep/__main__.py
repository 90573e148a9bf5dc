# SPDX-License-Identifier: Apache-2.0
"""Trains several agents that differ in some settings, and compares them.

python -m torchbeast.sweep --set learning_rate=0.0003,0.0006 entropy_cost=0.003,0.01 --env Catch
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from torchbeast.cli.command_line import parse_known
from torchbeast.errors import exit_code_of
from torchbeast.sweep.config import SweepFlags

PROGRAM = "sweep"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 when done or stopped, 1 if an agent failed, 2 on wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(argv))


def run(argv: Sequence[str] | None) -> int:
    """Trains the agents and compares them; returns the exit code."""
    from torchbeast.sweep import program  # --help needs none of it

    flags, words = parse_known(SweepFlags, PROGRAM, argv)
    return program.run(flags, words)


if __name__ == "__main__":
    sys.exit(main())
