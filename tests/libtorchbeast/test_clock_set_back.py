# SPDX-License-Identifier: Apache-2.0
"""The clock of a learner's machine is set back while it waits for a server.

The learner is a process of its own, because its clock is. gRPC's timers stand still from then on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from background import SOON
from ports import free_port
from served_envs import Counting, Vector
from serving import serving
from set_clock import SetClock
from test_door import hosting

DAY = 86_400

# Frames of HTTP/2: one that opens a connection, and how the first call begins.
NO_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FIRST_HEADERS = bytes([1, 4, 0, 0, 0, 1])

# Asks until the clock was set back, and once more; address, question, seconds for an answer.
ASKER = """
import contextlib, sys, time
import libtorchbeast
ask = getattr(libtorchbeast, sys.argv[2])
with contextlib.suppress(TimeoutError):
    ask("unix:/nowhere/env", 0.1)
began = time.time()
print("asks", flush=True)
is_last = False
while not is_last:
    is_last = time.time() < began
    with contextlib.suppress(TimeoutError):
        ask(sys.argv[1], float(sys.argv[3]))
print("ended", flush=True)
"""

# Loses its server, says so half a second later, when it tries to connect, and waits for it.
LEARNER = """
import sys
from background import wait_for
from serving import playing
with playing([sys.argv[1]], queue_size=1000) as game:
    game.rollout()
    print("plays", flush=True)
    wait_for(lambda: any(away > 0.5 for _, away, _ in game.pool.away_streams()))
    print("waits", flush=True)
    wait_for(lambda: game.pool.live_streams() == 1)
    print("plays", flush=True)
"""

# Lets a host go whose environment takes too long.
DOOR = """
import sys
from background import wait_for
from serving import Game
from libtorchbeast import Door
door = Door(sys.argv[1], step_timeout_s=3.0)
game = Game([])
print("listens", flush=True)
door.take(door.next(60)[0], game.pool)
game.rollout()
print("plays", flush=True)
wait_for(door.ended)
print("lets go", flush=True)
game.close()
door.close(run_has_ended=True)
print("ended", flush=True)
"""


class Learner:
    """A program with a clock that can be set; says what it does line by line."""

    def __init__(self, program: str, *args: str, clock: SetClock) -> None:
        path = os.pathsep.join(each for each in sys.path if each)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, *args],
            env=os.environ | {"PYTHONPATH": path} | clock.environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self._said: IO[str] = self._process.stdout
        self._limit = threading.Timer(2 * SOON, self._process.kill)
        self._limit.start()

    def waits_for(self, word: str) -> None:
        assert self._said.readline() == f"{word}\n", "it hangs"

    def close(self) -> None:
        self._limit.cancel()
        self._process.kill()
        self._process.communicate()


class SilentServer:
    """Accepts connections, and calls, and answers none."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> SilentServer:
        return self

    def __exit__(self, *_: Any) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._read, args=self._listener.accept()).start()

    def _read(self, end: socket.socket, _: Any) -> None:
        end.sendall(NO_SETTINGS)
        heard = b""
        with end:
            while received := end.recv(4096):
                heard += received
                if FIRST_HEADERS in heard:
                    self.was_asked.set()


@pytest.fixture
def clock(tmp_path: Path) -> SetClock:
    return SetClock(tmp_path)


@contextlib.contextmanager
def running(program: str, *args: str, clock: SetClock) -> Iterator[Learner]:
    learner = Learner(program, *args, clock=clock)
    try:
        yield learner
    finally:
        learner.close()


def test_a_wait_for_a_server_that_is_not_there_ends_in_time(clock: SetClock, address: str) -> None:
    with running(ASKER, address, "describe", "0.5", clock=clock) as learner:
        learner.waits_for("asks")
        clock.jump(-DAY)
        learner.waits_for("ended")


@pytest.mark.parametrize("question", ["describe", "server_status"])
def test_a_wait_for_a_server_that_does_not_answer_ends_in_time(
    clock: SetClock, question: str
) -> None:
    with SilentServer() as server:
        with running(ASKER, server.address, question, "0.5", clock=clock) as learner:
            assert server.was_asked.wait(SOON)
            clock.jump(-DAY)
            learner.waits_for("asks")
            learner.waits_for("ended")


def test_attempts_to_connect_go_on(clock: SetClock) -> None:
    """The clock is set back after each."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SOON)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with running(ASKER, address, "describe", str(2 * SOON), clock=clock):
            for _ in range(5):
                listener.accept()[0].close()
                clock.jump(-DAY)


def test_a_stream_that_is_lost_meanwhile_comes_back(clock: SetClock) -> None:
    at = f"127.0.0.1:{free_port()}"
    with running(LEARNER, at, clock=clock) as learner:
        with serving(Counting, at):
            learner.waits_for("plays")
        learner.waits_for("waits")
        clock.jump(-DAY)
        with serving(Counting, at):
            learner.waits_for("plays")


def test_a_host_that_takes_too_long_is_let_go(clock: SetClock, address: str) -> None:
    inside, go_on = threading.Event(), threading.Event()

    class Hanging(Vector):
        steps = 0

        def step(self, action: Any) -> Any:
            self.steps += 1
            if self.steps == 6:  # after the first rollout
                inside.set()
                go_on.wait(2 * SOON)
            return super().step(action)

    with running(DOOR, address, clock=clock) as learner:
        learner.waits_for("listens")
        with hosting(address, Hanging):
            learner.waits_for("plays")
            assert inside.wait(SOON)
            clock.jump(-DAY)
            learner.waits_for("lets go")
            learner.waits_for("ended")
            go_on.set()
