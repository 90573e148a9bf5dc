# SPDX-License-Identifier: Apache-2.0
"""The polling engine of gRPC, which it names when it starts; each test is a new process."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from background import SOON

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


def test_a_server_waits_as_grpc_does_by_default(address: str) -> None:
    assert run(SERVER, address)[0] != ["poll"]
