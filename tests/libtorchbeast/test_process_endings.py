# SPDX-License-Identifier: Apache-2.0
"""A process may end, with its own exit code, whatever its threads are doing inside the core."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
import served_envs
import serving
import warm
from background import SOON
from peers import RawStream
from ports import free_port

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
    "a host is played": """
door = libtorchbeast.Door(ADDRESS)
said = {"env_id": "Vector", "num_envs": 3, "num_streams": 1, "frame_stack": 1,
        "observation": ("int32", (1,)), "action_space": {"type": "Discrete", "n": 2}}
host = libtorchbeast.Host(served_envs.Vector, ADDRESS, description=said, name="a")
Background(host.play, 20)
game = serving.Game([])
door.take(door.next(20)[0], game.pool)
game.rollout()
""",
    "a thread asks a server for longer than Python lives": """
import socket
listener = socket.socket(socket.AF_UNIX)
listener.bind(ADDRESS.removeprefix("unix:"))
listener.listen()
go, ends = threading.Event(), []

def ask():
    go.wait()
    libtorchbeast.describe(ADDRESS, 0.5)

class Last:
    def __del__(self, ends=ends, sleep=time.sleep):
        while ends[0].recv(4096):  # until it asks no more
            pass
        sleep(0.5)  # it returns to Python

def begin():
    go.set()
    ends.append(listener.accept()[0])
    ends[0].sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # a connection, but no answer

threading.Thread(target=ask, daemon=True).start()
sys.kept_by_the_interpreter = Last()
at_the_end.append(begin)
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


def started(script: str, address: str) -> subprocess.Popen[str]:
    """Starts the script in its own process, which finds the tests' modules."""
    here = Path(served_envs.__file__).parent
    paths = [Path(libtorchbeast.__file__).parents[1], here, here.parent / "support"]
    return warm.Popen(
        [sys.executable, "-c", BEGIN + f"ADDRESS = {address!r}\n" + script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        stdout=warm.PIPE,
        stderr=warm.PIPE,
        text=True,
    )


def run(script: str, address: str) -> subprocess.CompletedProcess[str]:
    """Runs the script to its end."""
    with started(script, address) as process:
        try:  # a process that starts on a busy machine may need some of the time
            output, errors = process.communicate(timeout=3 * SOON)
        finally:
            process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


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


def test_a_door_whose_stream_is_played_can_be_dropped(address: str) -> None:
    """The stream's last inference needs the interpreter lock."""
    script = """
import faulthandler

faulthandler.dump_traceback_later(20, exit=True)
door = libtorchbeast.Door(ADDRESS)
said = {"env_id": "Vector", "num_envs": 3, "num_streams": 1, "frame_stack": 1,
        "observation": ("int32", (1,)), "action_space": {"type": "Discrete", "n": 2}}
host = libtorchbeast.Host(served_envs.Vector, ADDRESS, description=said, name="a")
Background(host.play, 20)
game = serving.Game([])
door.take(door.next(20)[0], game.pool)
game.rollout()
dropped = threading.Event()
Background(lambda: dropped.wait() and game.close())
sys.setswitchinterval(1000)  # from here on no other thread runs unless this one lets it
dropped.set()
del door
sys.exit(3)
"""
    ended = run(script, address)
    assert ended.returncode == 3, ended.stderr


def test_a_door_that_is_open_at_exit_accepts_no_connection_after_it(address: str) -> None:
    """A TLS handshake in the middle of the end of the process would crash it."""
    script = """
import socket
door = libtorchbeast.Door(ADDRESS)
def connect():
    with socket.socket(socket.AF_UNIX) as host:
        host.connect(ADDRESS.removeprefix("unix:"))
def check():
    try:
        connect()
    except OSError:
        return
    os._exit(5)
connect()
at_the_end.append(check)
sys.exit(3)
"""
    ended = run(script, address)
    assert ended.returncode == 3, ended.stderr


def test_the_forks_of_a_forked_child_keep_the_files_that_it_opens(address: str) -> None:
    script = """
server = libtorchbeast.Door(ADDRESS)
child = os.fork()
if child == 0:
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]  # take the numbers of sockets
    child = os.fork()
    if child == 0:
        [os.fstat(file) for file in opened]
        os._exit(4)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = run(script, address)
    assert ended.returncode == 4, ended.stderr


def test_a_forked_child_may_drop_a_door(address: str) -> None:
    script = """
door = libtorchbeast.Door(ADDRESS)
child = os.fork()
if child == 0:
    del door
    os._exit(4)
deadline = time.monotonic() + 20
while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
    time.sleep(0.01)
if ended == (0, 0):
    os.kill(child, 9)
    sys.exit("the child hangs")
assert door.next(0.0) is None
libtorchbeast.server_status(ADDRESS, 20)  # it still answers
sys.exit(os.waitstatus_to_exitcode(ended[1]))
"""
    ended = run(script, address)
    assert ended.returncode == 4, ended.stderr


@pytest.mark.parametrize("over", ["unix", "tcp"])
def test_a_child_of_a_killed_server_keeps_neither_its_address_nor_its_streams(
    address: str, over: str
) -> None:
    if over == "tcp":
        address = f"127.0.0.1:{free_port()}"
    script = """
class Forking(served_envs.Counting):
    def reset(self):
        child = os.fork()
        while child == 0:
            time.sleep(60)
        print(child, flush=True)
        return super().reset()

server = libtorchbeast.Server(Forking, ADDRESS)
Background(server.run)
assert server.wait_until_serving(30)
print(flush=True)
threading.Event().wait()
"""
    server = started(script, address)
    assert server.stdout is not None
    child = 0
    try:
        server.stdout.readline()
        with RawStream(address) as stream:
            stream.read()
            child = int(server.stdout.readline())
            server.kill()
            assert stream.end()[0] is grpc.StatusCode.UNAVAILABLE
        server.wait()
        with serving.serving(served_envs.Counting, address), RawStream(address) as another:
            another.read()
    finally:
        server.kill()
        if child:
            os.kill(child, signal.SIGKILL)
        server.communicate()


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
