# SPDX-License-Identifier: Apache-2.0
"""Transport alone: steps/s from environment servers to a learner that does nothing with them.

Mock environments, which cost next to nothing, in processes of their own; the real sockets, pool,
batcher and queue; a policy that answers zeros. What is left is the cost of moving steps.

python benchmarks/transport.py [--env Mock] [--envs_per_stream 1 16] [--seconds 5] [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import libtorchbeast
from torchbeast.runtime.addresses import folder_basename, new_run_folder, server_addresses
from torchbeast.runtime.env_plan import ServerPlan
from torchbeast.runtime.env_servers import EnvServers
from torchbeast.runtime.flags import available_cores
from torchbeast.runtime.supervisor import Supervisor

UNROLL_LENGTH = 20
NUM_STREAMS = 2  # of each server


def main() -> None:
    arguments = _arguments()
    figures = {
        num_envs: [_steps_per_second(arguments, num_envs) for _ in range(arguments.repeats)]
        for num_envs in arguments.envs_per_stream
    }
    print("| environments a stream | streams | steps/s, median | all runs |")
    print("| --- | --- | --- | --- |")
    for num_envs, rates in figures.items():
        runs = ", ".join(f"{rate:,.0f}" for rate in rates)
        streams = NUM_STREAMS * arguments.num_servers
        print(f"| {num_envs} | {streams} | {statistics.median(rates):,.0f} | {runs} |")
    if arguments.json:
        arguments.json.write_text(json.dumps(_record(arguments, figures), indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--env", default="Mock")
    parser.add_argument("--envs_per_stream", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--num_servers", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=5.0, help="measured, after a warm-up")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def _record(arguments: argparse.Namespace, figures: dict[int, list[float]]) -> dict[str, object]:
    return {
        "machine": f"{platform.processor() or platform.machine()}, {available_cores()} cores",
        "torch": torch.__version__,
        "settings": {key: str(value) for key, value in vars(arguments).items()},
        "steps_per_second": figures,
    }


def _steps_per_second(arguments: argparse.Namespace, envs_per_stream: int) -> float:
    plans = [ServerPlan(NUM_STREAMS, envs_per_stream)] * arguments.num_servers
    folder, supervisor = new_run_folder(), Supervisor()
    addresses = server_addresses(folder_basename(folder), len(plans))
    servers = EnvServers(supervisor, arguments.env, plans, addresses, folder)
    try:
        servers.wait_ready()
        return _measure(addresses * NUM_STREAMS, arguments.seconds)
    finally:
        servers.close()


def _measure(stream_addresses: Sequence[str], seconds: float) -> float:
    queue = libtorchbeast.BatchingQueue(batch_dim=1, maximum_batch_size=1, maximum_queue_size=8)
    batcher = libtorchbeast.DynamicBatcher(batch_dim=1, timeout_ms=None)
    pool = libtorchbeast.ActorPool(UNROLL_LENGTH, queue, batcher, list(stream_addresses), ())
    threads = [
        threading.Thread(target=target, args=args)
        for target, args in ((pool.run, ()), (_answer_zeros, (batcher,)), (_drop, (queue,)))
    ]
    for thread in threads:
        thread.start()
    time.sleep(seconds / 5)
    before, began = pool.count(), time.perf_counter()
    time.sleep(seconds)
    rate = (pool.count() - before) / (time.perf_counter() - began)
    batcher.close()
    queue.close()
    for thread in threads:
        thread.join()
    return rate


def _answer_zeros(batcher: libtorchbeast.DynamicBatcher) -> None:
    for batch in batcher:
        (_, reward, *_), _ = batch.get_inputs()
        batch.set_outputs(((torch.zeros(reward.shape, dtype=torch.int64),), ()))


def _drop(queue: libtorchbeast.BatchingQueue) -> None:
    for _ in queue:
        pass


if __name__ == "__main__":
    main()
