# SPDX-License-Identifier: Apache-2.0
"""Measures how fast TorchBeast runs on this machine, and what limits it.

python -m torchbeast.bench --env PongNoFrameskip-v4 --num_actors 32 --png bench.png
"""

from __future__ import annotations

from collections.abc import Sequence

from torchbeast.bench.flags import BenchFlags
from torchbeast.cli.command_line import parse
from torchbeast.errors import exit_code_of
from torchbeast.processes.supervisor import end_program

PROGRAM = "bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 when done or stopped, 1 on a failure, 2 on wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(BenchFlags, PROGRAM, argv)))


def run(flags: BenchFlags) -> int:
    """Measures and reports; imports here, since --help needs none of it. Returns the exit code."""
    from torchbeast.bench import program

    return program.run(flags)


if __name__ == "__main__":
    end_program(main())
