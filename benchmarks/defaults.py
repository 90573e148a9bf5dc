# SPDX-License-Identifier: Apache-2.0
"""Measures what the default number of environments brings: each program on Pong with its default
settings, and with 4 environments, the original's default.

With --original FOLDER, a checkout of the original TorchBeast that Python can import, the original
MonoBeast runs too, with its own default settings. The runs are interleaved.

python benchmarks/defaults.py [--programs monobeast] [--original FOLDER] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from figures import Figures, interleaved, print_table, write_json
from progress import Program, add_flags, measured, torchbeast

PROGRAMS = ("monobeast", "polybeast", "raybeast")
MODELS = {"polybeast": "deep"}  # of images, where it is not shallow


def main() -> None:
    arguments = _arguments()
    found: dict[str, Figures] = {}
    for program in arguments.programs:
        runs = {
            name: functools.partial(measured, each, arguments)
            for name, each in _runs(program, arguments.original)
        }
        found[program] = interleaved(runs, arguments.repeats)
        print_table(found[program], "agent steps/s")
        write_json(arguments.json, arguments, steps_per_second=found)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--original", type=Path, help="checkout of the original TorchBeast")
    add_flags(parser, warm_up=8.0)
    return parser.parse_args()


def _runs(program: str, original: Path | None) -> Iterator[tuple[str, Program]]:
    """Yields the runs to compare; the first is the one that the others are compared with."""
    model = MODELS.get(program, "shallow")
    ours = torchbeast(program, model, {})
    if original is not None and program == "monobeast":
        yield "the original, default settings", _original(ours, original)
    yield f"{program}, 4 environments", torchbeast(program, model, {"num_envs": 4})
    yield f"{program}, default settings", ours


def _original(ours: Program, checkout: Path) -> Program:
    """Returns the original MonoBeast, which writes the same log."""
    command = [*ours.command[:3], "--env=PongNoFrameskip-v4", "--total_steps=1000000000"]
    return dataclasses.replace(
        ours, name="the original", command=command, environment={"PYTHONPATH": str(checkout)}
    )


if __name__ == "__main__":
    main()
