# SPDX-License-Identifier: Apache-2.0
"""Measures what the ways between machines cost: sockets, TLS, and hosts that dial in.

Fixed environments send frames of Pong to a pool that drops every batch, all on this machine, so
both ends share its cores. The door runs in a process as in a learner, and for comparison in a
thread of the process of the pool, alone and beside a thread that keeps the interpreter busy.

python benchmarks/tunnel.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import ipaddress
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
from bench import fixed_env
from cryptography import x509
from figures import interleaved, print_table, write_json

import libtorchbeast
from torchbeast import envs
from torchbeast.keys import new_authority, new_server
from torchbeast.learning.session import raise_failure
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.servers.addresses import (
    folder_basename,
    new_run_folder,
    server_addresses,
    socket_path,
)
from torchbeast.sources.servers.config import LearnerSecurityConfig, ServerSecurityConfig
from torchbeast.sources.servers.credentials import learner_credentials
from torchbeast.sources.servers.env_servers import EnvServers
from torchbeast.sources.servers.plan import ServerPlan
from torchbeast.sources.tunnel import tls
from torchbeast.sources.tunnel.dialler import Dialler
from torchbeast.sources.tunnel.door import Door, Visit
from torchbeast.sources.tunnel.door_process import door

UNROLL_LENGTH = 20
FRAME_BYTES = 84 * 84
SERVERS, STREAMS = 2, 2  # streams of each server
TOKEN = "a-token-of-this-benchmark"

Reached = tuple[list[str], libtorchbeast.Credentials | None]


class Files:
    """An authority, a certificate for this machine and a token."""

    def __init__(self, folder: Path) -> None:
        authority = new_authority()
        here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        pair = new_server(authority, here, 1)
        contents = {
            "ca": authority.certificate_pem(),
            "cert": pair.certificate_pem(),
            "key": pair.key_pem(),
            "token": TOKEN.encode(),
        }
        for name, content in contents.items():
            (folder / name).write_bytes(content)
            (folder / name).chmod(0o600)
        token = str(folder / "token")
        self.listening = ServerSecurityConfig(
            tls_cert=str(folder / "cert"), tls_key=str(folder / "key"), token_file=token
        )
        self.connecting = LearnerSecurityConfig(tls_ca=str(folder / "ca"), token_file=token)


def main() -> None:
    arguments, supervisor = _arguments(), Supervisor()
    with contextlib.ExitStack() as stack:
        files = Files(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        serve = functools.partial(_served, supervisor, arguments.envs)
        here, credentials = stack.enter_context(serve())
        other, _ = stack.enter_context(serve(_free_ports(SERVERS), files.listening))
        dialled = stack.enter_context(_through_process(supervisor, files, here))
        inside = stack.enter_context(_through_thread(supervisor, files, here))
        measured = functools.partial(_rate, supervisor, arguments)
        runs = {
            "Unix sockets": lambda: measured(here, credentials),
            "TLS": lambda: measured(other, learner_credentials(files.connecting)),
            "dialled in": lambda: measured(dialled, None),
            "dialled in, door in a thread": lambda: measured(inside, None),
            "dialled in, busy interpreter": lambda: _beside_work(lambda: measured(dialled, None)),
            "dialled in, door in a thread, busy interpreter": lambda: _beside_work(
                lambda: measured(inside, None)
            ),
        }
        found = interleaved(runs, arguments.repeats)
    raise_failure(supervisor.failure)
    figures = {name: [rate for rate, _ in pairs] for name, pairs in found.items()}
    costs = {name: [cost for _, cost in pairs] for name, pairs in found.items()}
    print_table(figures, "steps/s")
    print_table({n: [v * FRAME_BYTES / 1e6 for v in f] for n, f in figures.items()}, "MB/s")
    print_table(costs, "CPU us per step")
    write_json(arguments.json, arguments, steps_per_second=figures, cpu_us_a_step=costs)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--envs", type=int, default=16, help="environments of a stream")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of one run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


@contextlib.contextmanager
def _served(
    supervisor: Supervisor,
    num_envs: int,
    basename: str | None = None,
    security: ServerSecurityConfig | None = None,
) -> Iterator[Reached]:
    """Serves fixed environments at Unix sockets, or at TCP ports."""
    folder = new_run_folder() if basename is None else None
    addresses = server_addresses(basename or folder_basename(folder or Path()), SERVERS)
    env = fixed_env.like(envs.EnvSpec("PongNoFrameskip-v4"))
    plans = [ServerPlan(STREAMS, num_envs)] * SERVERS
    servers = EnvServers(supervisor, env, plans, addresses, folder, security)
    try:
        servers.wait_ready()
        yield addresses, None
    finally:
        servers.close()


@contextlib.contextmanager
def _through_process(
    supervisor: Supervisor, files: Files, served: list[str]
) -> Iterator[list[str]]:
    """Yields the addresses of these servers at a door in a process."""
    listen = _free_ports(1)
    with door(supervisor, listen, files.listening) as opened, _dialling(listen, served, files):
        while not opened.here() and not supervisor.wait(0.05):
            pass
        yield list(opened.here()[0].addresses)


@contextlib.contextmanager
def _through_thread(supervisor: Supervisor, files: Files, served: list[str]) -> Iterator[list[str]]:
    """Yields the addresses of these servers at a door in a thread of this process."""
    listen, loop = _free_ports(1), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    visits: list[Visit] = []

    async def make(folder: Path) -> Door:
        return Door(folder, tls.of_door(files.listening), TOKEN, visits.append)

    host, _, port = listen.partition(":")
    with tempfile.TemporaryDirectory() as folder, socket.create_server((host, int(port))) as ear:
        ear.setblocking(False)
        made = asyncio.run_coroutine_threadsafe(make(Path(folder)), loop).result()
        accepting = asyncio.run_coroutine_threadsafe(made.accept(ear), loop)
        with _dialling(listen, served, files):
            while not visits and not supervisor.wait(0.05):
                pass
            yield list(visits[0].addresses)
        accepting.cancel()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()
        loop.call_soon_threadsafe(made.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


@contextlib.contextmanager
def _dialling(listen: str, served: list[str], files: Files) -> Iterator[None]:
    """Dials in a process of its own, as polybeast_env does."""
    sockets = [str(socket_path(address)) for address in served]
    spawned = multiprocessing.get_context("spawn").Process(
        target=_dial, args=(listen, sockets, files.connecting), daemon=True
    )
    spawned.start()
    try:
        yield
    finally:
        spawned.terminate()
        spawned.join()


def _dial(listen: str, sockets: list[str], files: LearnerSecurityConfig) -> None:
    Dialler(listen, sockets, files, print).run("0" * 16)  # the same servers throughout


def _free_ports(count: int) -> str:
    """Returns HOST:PORT of the first of some consecutive ports that nobody uses."""
    for first in range(20_000, 60_000, 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return f"127.0.0.1:{first}"
    raise RuntimeError("there are no free ports")


def _beside_work(run: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """Runs beside a thread that holds the interpreter lock as often as it gets it."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            sum(range(1000))

    worker = threading.Thread(target=work)
    worker.start()
    try:
        return run()
    finally:
        ended.set()
        worker.join()


def _rate(
    supervisor: Supervisor,
    arguments: argparse.Namespace,
    addresses: list[str],
    credentials: libtorchbeast.Credentials | None,
) -> tuple[float, float]:
    """Returns steps/s, and microseconds of CPU time a step of all processes."""
    queue = libtorchbeast.BatchingQueue(maximum_batch_size=1, maximum_queue_size=8)
    batcher = libtorchbeast.DynamicBatcher(batch_dim=1, timeout_ms=None)
    streams = [address for address in addresses for _ in range(STREAMS)]
    pool = libtorchbeast.ActorPool(
        UNROLL_LENGTH, queue, batcher, streams, (), credentials=credentials
    )
    bodies: list[Callable[[], None]] = [
        pool.run,
        functools.partial(_answer, batcher),
        functools.partial(_drain, queue),
    ]
    threads = [supervisor.start_thread(f"pool {i}", body) for i, body in enumerate(bodies)]
    while pool.count() < 4 * UNROLL_LENGTH * arguments.envs and not supervisor.wait(0.01):
        pass
    then, steps, cpu = time.perf_counter(), pool.steps(), _cpu_seconds()
    supervisor.wait(arguments.seconds)
    seconds, counted, used = time.perf_counter() - then, pool.steps() - steps, _cpu_seconds() - cpu
    for closed in (batcher, queue):
        with contextlib.suppress(RuntimeError):  # the pool has closed it
            closed.close()
    for thread in threads:
        thread.join()
    return counted / seconds, 1e6 * used / counted


def _answer(batcher: libtorchbeast.DynamicBatcher) -> None:
    for batch in batcher:
        (_, reward, *_), _ = batch.get_inputs()
        with contextlib.suppress(libtorchbeast.ClosedBatchingQueue, libtorchbeast.AsyncError):
            batch.set_outputs(((np.zeros(tuple(reward.shape), np.int64),), ()))


def _drain(queue: libtorchbeast.BatchingQueue) -> None:
    for _ in queue:
        pass


def _cpu_seconds() -> float:
    """Returns the CPU time of this process and all that it started."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(found.user + found.system for found in times))


if __name__ == "__main__":
    main()
