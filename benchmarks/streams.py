# SPDX-License-Identifier: Apache-2.0
"""Measures streams of one environment each by plain calls of Server, DynamicBatcher and ActorPool.

It uses only what a user of `libtorchbeast` writes, and what the original library has too: a fixed
environment that always returns the same frame, a policy that returns zeros, a learner that drops
its batches. Several checkouts are compared, interleaved, with each other and with gRPC alone
(bare_grpc.cc), whose servers send messages of the same size.

python benchmarks/streams.py [--library . ../other] [--bare build/bare/bare_grpc]

A library is a folder in which `import libtorchbeast` finds its module.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

UNROLL_LENGTH = 20
WARM_UP_S = 1.0


class FixedEnv:
    """A fixed environment with old Gym's interface, which both libraries support."""

    observation = np.zeros((4, 84, 84), np.uint8)  # 28 KB
    result: tuple[Any, ...] = (observation, 0.0, False, {})

    def reset(self) -> np.ndarray:
        return self.observation

    def step(self, action: Any) -> tuple[Any, ...]:
        return self.result


# ---- In the measured processes ------------------------------------------------------------------


def serve(address: str) -> None:
    """Serves until killed; prints `serving`, then its CPU time for each line of stdin."""
    from libtorchbeast import Server

    server = Server(FixedEnv, server_address=address)
    threading.Thread(target=server.run, daemon=True).start()
    print("serving", flush=True)
    for _ in sys.stdin:
        print(_processor_time(), flush=True)


def play(addresses: list[str], seconds: float, inference_threads: int) -> None:
    """Plays a stream per address; prints `playing` when measuring begins, then rate and costs."""
    import torch

    from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher

    torch.set_num_threads(1)
    queue = BatchingQueue(batch_dim=1, minimum_batch_size=1, maximum_batch_size=1)
    batcher = DynamicBatcher(
        batch_dim=1, minimum_batch_size=1, maximum_batch_size=512, timeout_ms=100
    )
    pool = ActorPool(UNROLL_LENGTH, queue, batcher, addresses, ())
    rows, batches = [0], [0]

    def answer() -> None:
        for batch in batcher:
            (_, reward, *_), _ = batch.get_inputs()
            rows[0] += reward.shape[1]
            batches[0] += 1
            batch.set_outputs(((torch.zeros(1, reward.shape[1], dtype=torch.int64),), ()))

    def drop() -> None:
        for _ in queue:
            pass

    for body in (pool.run, drop, *[answer] * inference_threads):
        threading.Thread(target=body, daemon=True).start()
    while pool.count() == 0:
        time.sleep(0.01)
    time.sleep(WARM_UP_S)
    print("playing", flush=True)
    began, steps, cpu = time.perf_counter(), pool.count(), _processor_time()
    time.sleep(seconds)
    took, cpu, steps = time.perf_counter() - began, _processor_time() - cpu, pool.count() - steps
    print(steps / took, cpu / steps * 1e6, rows[0] / batches[0], steps, flush=True)
    os._exit(0)  # without closing the streams, which no measurement needs


def _processor_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- In the comparing process -------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    if arguments.serve:
        return serve(arguments.serve)
    if arguments.play:
        return play(arguments.play, arguments.seconds, arguments.inference_threads)
    # Imported here, because the other modes must need nothing but the library.
    from figures import bare_grpc, interleaved, print_table, write_json

    costs: dict[str, dict[str, list[float]]] = {
        what: {} for what in ("learner us", "server us", "rows")
    }
    with ExitStack() as opened:
        runs: dict[str, Callable[[], float]] = {}
        for library in arguments.library:
            streams = opened.enter_context(_library(library, arguments))
            for cost in costs.values():
                cost[str(library)] = []
            runs[str(library)] = functools.partial(_note, str(library), streams, costs)
        if arguments.bare:
            size, servers = FixedEnv.observation.nbytes, arguments.num_servers
            measure = bare_grpc(arguments.bare, size, servers, arguments.num_streams)
            runs["gRPC alone"] = functools.partial(opened.enter_context(measure), arguments.seconds)
        figures = interleaved(runs, arguments.repeats)
    print_table(figures, "steps/s")
    for what, cost in costs.items():
        print_table(cost, what)
    write_json(arguments.json, arguments, steps_per_second=figures, costs=costs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", nargs="+", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument(
        "--bare", type=Path, help="the program bare_grpc; without it gRPC alone is not measured"
    )
    parser.add_argument("--num_streams", type=int, default=8, help="of all servers together")
    parser.add_argument("--num_servers", type=int, default=2)
    parser.add_argument("--inference_threads", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="length of one run, after a warm-up"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


Measured = tuple[
    float, float, float, float
]  # steps/s, us of learner and server per step, rows per batch


def _note(
    name: str, streams: Callable[[], Measured], costs: dict[str, dict[str, list[float]]]
) -> float:
    rate, *spent = streams()
    for cost, value in zip(costs.values(), spent, strict=True):
        cost[name].append(value)
    return rate


@contextmanager
def _library(library: Path, arguments: argparse.Namespace) -> Iterator[Callable[[], Measured]]:
    """Yields the measurement of a library's streams; its servers live as long as the context."""
    with tempfile.TemporaryDirectory(prefix="torchbeast-") as folder, ExitStack() as opened:
        addresses = [f"unix:{folder}/{i}" for i in range(arguments.num_servers)]
        servers = [opened.enter_context(_child(library, "--serve", a)) for a in addresses]
        for server in servers:
            assert _said(server) == "serving"

        def measure() -> Measured:
            streams = [addresses[i % len(addresses)] for i in range(arguments.num_streams)]
            options = ("--seconds", str(arguments.seconds))
            threads = ("--inference_threads", str(arguments.inference_threads))
            with _child(library, "--play", *streams, *options, *threads) as player:
                assert _said(player) == "playing"
                before = sum(map(_spent, servers))
                rate, learner, rows, steps = map(float, _said(player).split())
                cost = sum(map(_spent, servers)) - before
            return rate, learner, cost / steps * 1e6, rows

        yield measure


@contextmanager
def _child(library: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs this program in another mode with that library, and kills it at the end."""
    child = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=os.environ | {"PYTHONPATH": str(library.resolve())},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def _said(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def _spent(server: subprocess.Popen[str]) -> float:
    """Returns the CPU time of a server so far, in seconds."""
    assert server.stdin is not None
    print("?", file=server.stdin, flush=True)
    return float(_said(server))


if __name__ == "__main__":
    main()
