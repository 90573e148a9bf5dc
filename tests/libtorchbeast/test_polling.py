# SPDX-License-Identifier: Apache-2.0
"""How gRPC waits: its polling engine, which it names when it starts, and the threads that it wakes.

Each test starts a new process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import wire
from background import SOON
from peers import RawStream
from serving import served_elsewhere

VARIABLE = "GRPC_POLL_STRATEGY"
LEARNER = """
import contextlib, subprocess, sys
import libtorchbeast
with contextlib.suppress(TimeoutError):
    libtorchbeast.describe(sys.argv[1], 0.01)
sys.exit(subprocess.call(["printenv", "GRPC_POLL_STRATEGY"]))
"""
SERVER = """
import sys, threading
import libtorchbeast
server = libtorchbeast.Server(lambda: None, sys.argv[1])
running = threading.Thread(target=server.run)
running.start()
server.wait_until_serving()
server.stop()
running.join()
"""


def run(program: str, address: str, **environment: str) -> tuple[list[str], str, int]:
    """Returns the polling engines that gRPC named, the output of the program, and its exit code."""
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    ended = subprocess.run(
        [sys.executable, "-c", program, address],
        env=inherited | {"GRPC_VERBOSITY": "debug"} | environment,
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    engines = re.findall(r"Using polling engine: (\w+)", ended.stderr)
    if not engines:
        pytest.skip("this gRPC does not say how it waits")
    return engines, ended.stdout, ended.returncode


def test_every_thread_of_a_learner_waits_for_its_own_socket(address: str) -> None:
    assert run(LEARNER, address)[0] == ["poll"]


def test_a_process_that_a_learner_starts_does_not_inherit_the_choice(address: str) -> None:
    _, printed, code = run(LEARNER, address)
    assert printed == "" and code == 1  # printenv: there is no such variable


def test_the_polling_engine_of_the_user_is_kept(address: str) -> None:
    engines, printed, _ = run(LEARNER, address, GRPC_POLL_STRATEGY="epoll1")
    assert engines == ["epoll1"] and printed == "epoll1\n"


def test_every_thread_of_a_server_waits_for_its_own_socket(address: str) -> None:
    assert run(SERVER, address)[0] == ["poll"]


@pytest.mark.skipif(sys.platform != "linux", reason="counts by /proc")
def test_a_message_wakes_only_the_thread_of_its_stream(tmp_path: Path) -> None:
    action, steps = wire.vector_action(wire.leaf(wire.INT64, (3,), bytes(24))), 2000
    with (
        served_elsewhere(tmp_path / "socket") as server,
        RawStream(f"unix:{tmp_path / 'socket'}", "StreamingVectorEnv") as stream,
    ):
        stream.send(wire.vector_action(seed=1))
        stream.read()

        def play() -> None:
            for _ in range(steps):
                stream.send(action)
                stream.read()

        play()  # for its first 100 ms, the server listens for more calls as well
        before = wakeups(server.pid)
        play()
        woken = wakeups(server.pid) - before
    # Other threads look around a few times a second, which counts if steps are slow.
    assert woken < 2.5 * steps


def wakeups(pid: int) -> int:
    """Returns how often threads of a process have waited so far."""
    waits = "voluntary_ctxt_switches:"
    lines = [
        line
        for status in Path(f"/proc/{pid}/task").glob("*/status")
        for line in status.read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith(waits))
