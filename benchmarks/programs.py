# SPDX-License-Identifier: Apache-2.0
"""PolyBeast and MonoBeast on Pong beside the yardstick, in turn, with several networks.

The yardstick (ideal.py) steps, infers and learns in turn in one process, with as many environments
in as large batches. The ratio to it is what the machinery costs, or gains by overlapping.

python benchmarks/programs.py [--models shallow deep] [--num_actors 32] [--seconds 30] [--repeats 3]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ideal
import torch
from figures import Figures, print_table, write_json
from progress import measured, torchbeast

from torchbeast.bench.turns import in_turn
from torchbeast.cli.flags import available_cores

MODELS = ("shallow", "deep", "small_net:SmallConvNet")
SETTINGS = ("num_actors", "unroll_length", "batch_size")
PROGRAMS = ("polybeast", "monobeast")


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(available_cores())
    figures: dict[str, Figures] = {}
    for model in arguments.models:
        runs: dict[str, Callable[[], float]] = {f"ideal, {model}": _ideal(arguments, model)}
        for program in arguments.programs:
            found = torchbeast(program, model, _flags(arguments))
            runs[f"{program}, {model}"] = functools.partial(measured, found, arguments)
        figures[model] = in_turn(runs, arguments.repeats)
        print_table(figures[model], "agent steps/s")
        write_json(arguments.json, arguments, steps_per_second=figures)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--num_actors", type=int, default=32)
    parser.add_argument("--unroll_length", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--warm_up", type=float, default=5.0, help="seconds, not timed")
    parser.add_argument("--seconds", type=float, default=30.0, help="of one run")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds until it learns")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def _flags(arguments: argparse.Namespace) -> dict[str, object]:
    return {
        name: getattr(arguments, name) for name in ("num_actors", "unroll_length", "batch_size")
    }


def _ideal(arguments: argparse.Namespace, model: str) -> Callable[[], float]:
    """One process, the first update of which is over."""
    num_envs, unroll_length = arguments.num_actors, arguments.unroll_length
    settings = ideal.parse(
        [f"--model={model}", f"--num_envs={num_envs}", f"--unroll_length={unroll_length}"]
    )
    updates = ideal.loop_of(settings, (settings.precision[0], settings.megabytes_at_once[0]))
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
