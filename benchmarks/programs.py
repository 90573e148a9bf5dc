# SPDX-License-Identifier: Apache-2.0
"""Compares the programs on Pong with the reference loop, for several networks.

The reference loop (reference_loop.py) steps, infers and learns sequentially in one process, with
the same number of environments and the same batch size. The ratio to it is what the machinery
costs, or what it gains by overlapping. The runs are interleaved.

python benchmarks/programs.py [--models shallow deep] [--programs monobeast raybeast]
    [--num_envs 32] [--seconds 30] [--repeats 3]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator

import reference_loop
import torch
from figures import Figures, interleaved, print_table, write_json
from progress import add_flags, measured, torchbeast

from torchbeast.fleets.system import available_cores

MODELS = ("shallow", "deep", "small_net:SmallConvNet")
SETTINGS = ("num_envs", "unroll_length", "batch_size")
PROGRAMS = ("polybeast", "monobeast", "raybeast")


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(available_cores())
    figures: dict[str, Figures] = {}
    for model in arguments.models:
        runs: dict[str, Callable[[], float]] = {
            f"reference loop, {model}": _reference(arguments, model)
        }
        for program in arguments.programs:
            found = torchbeast(program, model, _flags(arguments))
            runs[f"{program}, {model}"] = functools.partial(measured, found, arguments)
        figures[model] = interleaved(runs, arguments.repeats)
        print_table(figures[model], "agent steps/s")
        write_json(arguments.json, arguments, steps_per_second=figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument(
        "--programs", nargs="+", choices=PROGRAMS, default=["polybeast", "monobeast"]
    )
    parser.add_argument("--num_envs", type=int, default=32)
    parser.add_argument("--unroll_length", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=32)
    add_flags(parser)
    return parser.parse_args()


def _flags(arguments: argparse.Namespace) -> dict[str, object]:
    return {name: getattr(arguments, name) for name in SETTINGS}


def _reference(arguments: argparse.Namespace, model: str) -> Callable[[], float]:
    """Returns the run of the reference loop, after its first update."""
    num_envs, unroll_length = arguments.num_envs, arguments.unroll_length
    settings = reference_loop.parse(
        [f"--model={model}", f"--num_envs={num_envs}", f"--unroll_length={unroll_length}"]
    )
    updates = reference_loop.loop_of(
        settings, (settings.precision[0], settings.megabytes_at_once[0])
    )
    next(updates)
    steps = num_envs * unroll_length
    return functools.partial(_steps_per_second, updates, steps, arguments.seconds)


def _steps_per_second(updates: Iterator[object], steps: int, seconds: float) -> float:
    began = time.perf_counter()
    for count in itertools.count(1):
        next(updates)
        took = time.perf_counter() - began
        if took >= seconds:
            return count * steps / took
    raise AssertionError("counting does not end")


if __name__ == "__main__":
    main()
