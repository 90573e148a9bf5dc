# SPDX-License-Identifier: Apache-2.0
"""PolyBeast on Pong with several networks, in turn: steps/s and processor time a step.

python benchmarks/programs.py [--models shallow deep] [--num_actors 32] [--seconds 20] [--repeats 3]
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from figures import print_table, write_json

from torchbeast.bench.turns import in_turn
from torchbeast.bench.whole import whole
from torchbeast.runtime.flags import (
    EnvironmentFlags,
    FleetFlags,
    LearningFlags,
    ModelFlags,
    PolyBeastFlags,
)
from torchbeast.runtime.session import raise_failure
from torchbeast.runtime.supervisor import Supervisor


def main() -> None:
    arguments, supervisor = _arguments(), Supervisor()
    runs = {
        model: functools.partial(whole(_flags(arguments, model), supervisor), arguments.seconds)
        for model in arguments.models
    }
    samples = in_turn(runs, arguments.repeats)
    raise_failure(supervisor.failure)
    figures = {name: [each.steps_per_second for each in found] for name, found in samples.items()}
    costs = {name: [each.cpu_us for each in found] for name, found in samples.items()}
    print_table(figures, "steps/s")
    print_table(costs, "CPU us a step")
    write_json(arguments.json, arguments, steps_per_second=figures, cpu_us_a_step=costs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="PongNoFrameskip-v4")
    parser.add_argument("--models", nargs="+", default=["shallow", "deep"])
    parser.add_argument("--num_actors", type=int, default=32)
    parser.add_argument("--unroll_length", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0, help="measured, after a warm-up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def _flags(arguments: argparse.Namespace, model: str) -> PolyBeastFlags:
    return PolyBeastFlags(
        environment=EnvironmentFlags(env=arguments.env),
        model=ModelFlags(model=model),
        learning=LearningFlags(
            unroll_length=arguments.unroll_length, batch_size=arguments.batch_size
        ),
        fleet=FleetFlags(num_actors=arguments.num_actors),
    )


if __name__ == "__main__":
    main()
