# SPDX-License-Identifier: Apache-2.0
"""Measures the networks alone: microseconds per row to learn from and to act on Atari frames.

All requested combinations are measured, interleaved, and compared with the machine's rate of
float32 matrix products. The layout "first" is the memory layout that torchbeast does not use.

python benchmarks/compute.py learn --models shallow deep --layouts last first --megabytes 2.7 0
python benchmarks/compute.py infer --models shallow deep --rows 8 16 32 64 --threads 1 2
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from bench import synthetic
from figures import interleaved, print_table, write_json
from reference_loop import learner
from torch.utils.flop_counter import FlopCounterMode

from torchbeast.collect.config import RolloutConfig
from torchbeast.core.actors import torsos
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec, Precision
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.fleets.system import available_cores, keep_freed_memory

FRAMES, ACTIONS = ArraySpec((4, 84, 84), "uint8"), Discrete(6)
LAYOUTS = {
    "last": torsos.as_images,
    "first": lambda frames: torsos.channels_first(torsos.as_float(frames)),
}


class Case(NamedTuple):
    """One combination of settings."""

    model: str
    precision: Precision
    layout: str
    threads: int
    size: float  # of one slice: rows to act on, megabytes to learn from

    def name(self, unit: str) -> str:
        model, precision, layout, threads, size = self
        return f"{model}, {precision}, channels {layout}, {threads} threads, {size:g} {unit}"


def main() -> None:
    arguments = _arguments()
    keep_freed_memory()
    is_learning = arguments.what == "learn"
    sizes, unit = (arguments.megabytes, "MB") if is_learning else (arguments.rows, "rows")
    cases = itertools.product(
        arguments.models, arguments.precision, arguments.layouts, arguments.threads, sizes
    )
    make = _learning if is_learning else _inference
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    runs, flops = {}, {}
    for case in itertools.starmap(Case, cases):
        name = case.name(unit)
        runs[name] = functools.partial(_timed, make(case, arguments), case, clock)
        flops[name] = _flops(case, arguments, is_learning)
        runs[name]()  # warm-up: the first is slower
    products = {threads: _products(threads) for threads in arguments.threads}
    figures = interleaved(runs, arguments.repeats)
    print_table(figures, "us per row")
    print("\nGFLOP/s, and their share of the rate of matrix products:")
    for name, values in figures.items():
        rate = flops[name] / statistics.median(values) / 1e3
        of = products[int(name.split(", ")[3].split()[0])]
        print(f"{name}: {rate:.0f}, {rate / of:.0%} of {of:.0f}")
    write_json(arguments.json, arguments, us_a_row=figures, flops_a_row=flops, gflops=products)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["learn", "infer"])
    parser.add_argument("--models", nargs="+", default=["shallow", "deep"])
    parser.add_argument("--use_lstm", action="store_true")
    parser.add_argument("--precision", nargs="+", default=["auto"])
    parser.add_argument("--layouts", nargs="+", default=["last"], choices=list(LAYOUTS))
    parser.add_argument("--threads", type=int, nargs="+", default=[available_cores()])
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[32], help="rows of an inference batch"
    )
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[2.7], help="of a slice; 0: the whole batch"
    )
    parser.add_argument("--unroll_length", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cpu_time", action="store_true", help="measure CPU time; for one thread on a busy machine"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def _timed(run: Callable[[], int], case: Case, clock: Callable[[], float]) -> float:
    """Returns the microseconds per row of one run."""
    torsos.as_images = LAYOUTS[case.layout]
    before = clock()
    rows = run()
    return (clock() - before) / rows * 1e6


def _agent(case: Case, use_lstm: bool) -> Agent:
    agent = make_agent(ActorSpec(case.model, use_lstm=use_lstm), FRAMES, ACTIONS, 1)
    agent.model.set_precision(case.precision, torch.device("cpu"))
    return agent


def _learning(case: Case, arguments: argparse.Namespace) -> Callable[[], int]:
    """Returns a run of one update; a row is a learnt step."""
    made = learner(
        ActorSpec(case.model, use_lstm=arguments.use_lstm),
        (FRAMES, ACTIONS, 1),
        RolloutConfig(batch_size=arguments.batch_size, unroll_length=arguments.unroll_length),
        case.threads,
        case.precision,
        case.size,
    )
    threads = torch.get_num_threads()
    rollout = synthetic.rollout(
        made.agent, FRAMES, arguments.unroll_length, arguments.batch_size, extras=made.algo.needs
    )

    def run() -> int:
        torch.set_num_threads(threads)
        made.optimiser_step.update(rollout)
        return rollout.num_steps

    return run


def _inference(case: Case, arguments: argparse.Namespace) -> Callable[[], int]:
    """Returns a run of ten inference batches."""
    agent, rows, batches = _agent(case, arguments.use_lstm), int(case.size), 10
    inputs, state = synthetic.model_inputs(agent, FRAMES, rows), agent.model.initial_state(rows)

    def run() -> int:
        torch.set_num_threads(case.threads)
        for _ in range(batches):
            agent.model.act(inputs, state)
        return rows * batches

    return run


def _flops(case: Case, arguments: argparse.Namespace, is_learning: bool) -> float:
    """Returns the floating-point operations per row, counted with one row."""
    agent = _agent(case, arguments.use_lstm)
    with FlopCounterMode(display=False) as counter:
        inputs = synthetic.model_inputs(agent, FRAMES, 1)
        output = agent.model(inputs, agent.model.initial_state(1))
        if is_learning:
            (output.policy_logits.sum() + output.baseline.sum()).backward()
    return float(counter.get_total_flops())


def _products(threads: int) -> float:
    """Returns the GFLOP/s of the fastest of ten products of large float32 matrices."""
    torch.set_num_threads(threads)
    a, b = torch.randn(2, 2048, 2048)
    seconds = []
    for _ in range(10):
        before = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - before)
    return 2 * 2048**3 / min(seconds) / 1e9


if __name__ == "__main__":
    main()
