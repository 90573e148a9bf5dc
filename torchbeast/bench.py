# SPDX-License-Identifier: Apache-2.0
"""Measures how fast TorchBeast runs on this machine, and what limits it.

python -m torchbeast.bench --env PongNoFrameskip-v4 --num_envs 32 --png bench.png

The measurements are in benchmarks/bench of the repository.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from torchbeast.cli.command_line import parse, run_with
from torchbeast.errors import UsageError, exit_code_of
from torchbeast.fleets.supervisor import end_program

PROGRAM = "bench"
_FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 when done or stopped, 1 on a failure, 2 on wrong usage."""
    return exit_code_of(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    if not (_FOLDER / "bench").is_dir():
        raise UsageError(
            "the benchmarks are not part of the installed package: run this in a clone of the "
            "repository"
        )
    sys.path.insert(0, str(_FOLDER))
    from bench.flags import BenchFlags

    flags = parse(BenchFlags, PROGRAM, argv)
    from bench import program  # not needed by --help

    return run_with(flags, program.run)


if __name__ == "__main__":
    end_program(main())
