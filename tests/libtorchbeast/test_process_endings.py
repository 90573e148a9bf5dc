# SPDX-License-Identifier: Apache-2.0
"""A process may end, with its own exit code, whatever its threads are doing inside the core."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import served_envs
from background import SOON

import libtorchbeast

BEGIN = """
import atexit
at_the_end = []  # called after what the core does when a process ends
atexit.register(lambda: [call() for call in at_the_end])

import os, sys, threading, time
import numpy as np
import libtorchbeast, served_envs, background, serving
from background import Background
"""

ENDINGS = {
    "a consumer waits": """
queue = libtorchbeast.BatchingQueue()
Background(next, queue).wait_until_blocked()
""",
    "a consumer was just woken": """
queue = libtorchbeast.BatchingQueue()
for _ in range(5):
    Background(next, queue).wait_until_blocked()
queue.close()
""",
    "a producer waits": """
queue = libtorchbeast.BatchingQueue(maximum_batch_size=1, maximum_queue_size=1)
queue.enqueue(np.zeros((1, 1)))
Background(queue.enqueue, np.zeros((1, 1))).wait_until_blocked()
""",
    "callers wait for an answer": """
batcher = libtorchbeast.DynamicBatcher()
for _ in range(3):
    Background(batcher.compute, np.zeros((1, 1)))
background.wait_for(lambda: batcher.size() == 3)
""",
    "a batch is held": """
batcher = libtorchbeast.DynamicBatcher()
Background(batcher.compute, np.zeros((1, 1)))
batch = next(batcher)
""",
    "a server runs": """
server = libtorchbeast.Server(served_envs.Counting, ADDRESS)
Background(server.run)
assert server.wait_until_serving(30)
""",
    "a pool waits for its server": """
game = serving.Game([ADDRESS])
""",
    "a pool plays": """
server = libtorchbeast.Server(served_envs.Counting, ADDRESS)
Background(server.run)
game = serving.Game([ADDRESS] * 2)
game.rollouts(3)
""",
    "an environment is in a step": """
server = libtorchbeast.Server(served_envs.Waiting, ADDRESS)
Background(server.run)
game = serving.Game([ADDRESS])
assert served_envs.Waiting.inside.wait(30)
threading.Timer(0.2, served_envs.Waiting.go_on.set).start()
""",
    "an environment hangs in a step": """
class Hanging(served_envs.Counting):
    def step(self, action):
        inside.set()
        while True:
            time.sleep(0.001)  # takes the interpreter lock again and again, also at the end

inside = threading.Event()
server = libtorchbeast.Server(Hanging, ADDRESS)
Background(server.run)
game = serving.Game([ADDRESS])
assert inside.wait(30)
""",
}

FORK = (
    ENDINGS["a consumer waits"]
    + ENDINGS["a pool plays"]
    + """
child = os.fork()
if child == 0:
    at_the_end.append(lambda: queue.is_closed() and os._exit(5))
    del server, game
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
assert not queue.is_closed()
game.rollouts(3)
with serving.playing([ADDRESS]) as another:
    another.rollout()
"""
)


def run(script: str, address: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in its own process, which finds the tests' modules."""
    here = Path(served_envs.__file__).parent
    paths = [Path(libtorchbeast.__file__).parents[1], here, here.parent]
    return subprocess.run(
        [sys.executable, "-c", BEGIN + f"ADDRESS = {address!r}\n" + script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=3 * SOON,  # a process that starts on a busy machine may need some of it
    )


@pytest.mark.parametrize("script", ENDINGS.values(), ids=ENDINGS.keys())
def test_a_process_ends_with_its_own_exit_code_while(script: str, address: str) -> None:
    ended = run(script + "sys.exit(3)\n", address)
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr == ""


def test_a_forked_child_ends_without_effect_on_its_parent(address: str) -> None:
    ended = run(FORK + "sys.exit(3)\n", address)
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr == ""


def test_a_forked_child_closes_its_own_objects_at_exit(address: str) -> None:
    script = """
inherited = libtorchbeast.BatchingQueue()
child = os.fork()
if child == 0:
    queue = libtorchbeast.BatchingQueue()
    del inherited
    at_the_end.append(lambda: queue.is_closed() or os._exit(5))
    Background(next, queue).wait_until_blocked()
    sys.exit(4)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = run(script, address)
    assert ended.returncode == 4, ended.stderr


def test_the_socket_file_is_removed_by_a_process_that_did_not_stop_its_server(address: str) -> None:
    assert run(ENDINGS["a server runs"], address).returncode == 0
    assert not Path(address.removeprefix("unix:")).exists()


@pytest.mark.parametrize("name", ["num_envs", "frame_stack"])
def test_a_vector_environment_whose_size_raises_is_reported_without_a_deadlock(
    address: str, name: str
) -> None:
    """Runs in its own process, because a deadlock would keep the interpreter lock forever."""
    script = f"""
class Unsure(served_envs.Vector):
    {name} = None

server = libtorchbeast.Server(Unsure, ADDRESS)
Background(server.run)
assert server.wait_until_serving(30)
try:
    libtorchbeast.describe(ADDRESS, 20)
except RuntimeError as error:
    assert "the environment's {name} must be an integer, got None" in str(error), error
    sys.exit(3)
"""
    ended = run(script, address)
    assert ended.returncode == 3, ended.stderr
