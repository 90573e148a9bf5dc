# SPDX-License-Identifier: Apache-2.0
"""Speaks random nonsense to live peers, for a time or a number of sessions.

python tests/libtorchbeast/fuzz_peers.py PEER [--seconds 60 | --sessions N] [--seed 0]

PEER: server, learner, door (a learner that hosts dial in to) or host (one that dials in).

Every session must end with a documented status or error, soon; between sessions sound peers must be
served; and memory may not grow. Prints how the sessions ended, as JSON. Exit code 1 and the number
of the session if one did not end so: `--first N` begins with it. A crash ends the process, which
prints the number of the session before.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import hostile_messages as hostile
import numpy as np
import psutil
import wire
from background import SOON, Background, wait_for
from peers import RawStream, Unary, raw_server
from served_envs import Counting, Vector
from serving import Game, playing, serving

from libtorchbeast import Credentials, Host
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.joining import JoinServer

MOST_GROWTH = 300 << 20  # bytes, beyond what the first sessions take
MOST_AT_ONCE = 1 << 30  # bytes beyond that for a moment: a message of 65 MB is there several times
_WARM_UP = 50  # sessions
_CHECK_EVERY = 100  # sessions
_NUM_ENVS = 3  # of Vector

STATUSES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.INTERNAL,  # gRPC's own, for bytes that are no message
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
REFUSALS = {  # of a learner to a host
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
}
ERRORS = (ValueError, OSError, RuntimeError)


class Finding(AssertionError):
    """A peer could do what none may."""


_M_ARENA_MAX = -8  # from <malloc.h>


def keep_free_memory_in_few_places() -> None:
    """Lets the memory of this process show what is in use, within 128 MiB.

    glibc keeps up to 64 MiB of what was freed in each of its arenas, of which it makes up to eight
    for each core: a large message that comes in pieces leaves that much in the arena of its thread.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 2)


class Memory:
    """Watches the memory of this process, of both peers together."""

    def __init__(self) -> None:
        self._rss = psutil.Process().memory_info
        self._at_first, self._least = 0, 0

    def has_warmed_up(self) -> None:
        self._at_first = self._least = self._rss().rss

    def look(self) -> None:
        """Raises Finding if one session took too much."""
        grown = self._rss().rss - self._at_first
        if self._at_first and grown > MOST_AT_ONCE:
            raise Finding(f"memory has grown by {grown >> 20} MiB for a moment")
        self._least = min(self._least, self._at_first + grown)

    def check_growth(self) -> None:
        """Raises Finding if all sessions since the last call had more than at first."""
        grown = self._least - self._at_first
        if grown > MOST_GROWTH:
            raise Finding(f"memory has grown by {grown >> 20} MiB")
        self._least = self._rss().rss if self._at_first else 0


class ServerSessions:
    """Learners that send nonsense to our servers, one of each protocol."""

    def __init__(self, folder: Path) -> None:
        self._original, self._vector = f"unix:{folder}/original", f"unix:{folder}/vector"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with serving(Counting, self._original), serving(Vector, self._vector):
            yield

    def session(self, rng: random.Random) -> str:
        """Plays one session; returns how it ended."""
        if rng.random() < 0.5:
            return self._play(self._original, "StreamingEnv", self._original_messages(rng), 1)
        method = "StreamingVectorEnv" if rng.random() < 0.9 else "Describe"
        return self._play(self._vector, method, self._vector_messages(rng), 0)

    def check(self) -> None:
        """A sound learner is served."""
        for address in (self._original, self._vector):
            with playing([address]) as game:
                game.rollouts(2)

    def _original_messages(self, rng: random.Random) -> list[bytes]:
        return _messages(rng, hostile.action)

    def _vector_messages(self, rng: random.Random) -> list[bytes]:
        first = _messages(rng, hostile.seed, most=1)
        messages = [*first, *_messages(rng, lambda rng: hostile.vector_action(rng, _NUM_ENVS))]
        if rng.random() < 0.1:
            rng.shuffle(messages)
        return messages

    def _play(self, address: str, method: str, messages: list[bytes], unasked: int) -> str:
        with RawStream(address, method) as stream:
            return _played(stream, messages, STATUSES, unasked)


class LearnerSessions:
    """Servers, one of each protocol, that send nonsense to our learner."""

    def __init__(self, folder: Path) -> None:
        self._original, self._vector = f"unix:{folder}/original", f"unix:{folder}/vector"
        self._description = b""
        self._steps: list[bytes] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        answer = Unary(lambda: self._description)
        methods = {"Describe": answer, "StreamingVectorEnv": partial(self._stream, unasked=0)}
        with raw_server(self._vector, **methods):
            with raw_server(self._original, StreamingEnv=partial(self._stream, unasked=1)):
                yield

    def session(self, rng: random.Random) -> str:
        """Plays one session; returns how it ended."""
        if rng.random() < 0.3:
            self._steps = _messages(rng, hostile.step, most=12)
            return self._play(self._original)
        describes_well = rng.random() < 0.8
        teller = hostile.Calm() if describes_well else rng
        self._description = hostile.description(teller, _NUM_ENVS)
        self._steps = _messages(rng, lambda rng: hostile.vector_step(rng, _NUM_ENVS), most=12)
        return self._play(self._vector)

    def check(self) -> None:
        """Each session has a learner of its own: there is none to check."""

    def _stream(
        self, requests: Iterator[bytes], context: grpc.ServicerContext, unasked: int
    ) -> Iterator[bytes]:
        """Answers requests with the steps, then ends the call; unasked: sent before one."""
        for number, message in enumerate(self._steps):
            if number >= unasked and next(requests, None) is None:
                return
            yield message

    def _play(self, address: str) -> str:
        game = Game(
            [address],
            unroll_length=2,
            connect_timeout_s=2.0,
            reconnect_timeout_s=0.0,
            step_timeout_s=0.2,
            queue_size=64,
        )
        try:
            game.end()
        except ERRORS as error:
            if address not in str(error):
                raise Finding(f"{error!r} does not name its server") from error
            return type(error).__name__
        finally:
            game.close()
        raise Finding("the learner ended without an error")


class Frames(Vector):
    """Serves the frames that hostile_messages describes, one every 5 ms."""

    def observation(self) -> Any:
        time.sleep(0.005)
        return np.zeros((_NUM_ENVS, 3, 2), np.uint8)


_LEARNER = "rpcenv.RPCLearner"
_TOKEN = "a-token-of-this-test"
_SAID = {
    "env_id": "Fake",
    "num_envs": _NUM_ENVS,
    "num_streams": 1,
    "frame_stack": 1,
    "observation": ("uint8", (3, 2)),
    "action_space": None,
}


class JoinServerSessions:
    """Hosts that send nonsense to a learner that they dial in to; a sound one plays beside them."""

    def __init__(self, folder: Path) -> None:
        token = folder / "token"
        token.write_text(_TOKEN)
        token.chmod(0o600)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._security = SecurityConfig(insecure=True, token_file=str(token))
        self._silent: deque[RawStream] = deque()
        self._rollouts = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        closed, door = threading.Event(), JoinServer(self._address, self._security)
        with contextlib.ExitStack() as at_the_end:
            at_the_end.enter_context(self._sound_host())
            at_the_end.callback(door.close, run_has_ended=True)
            door.find(None, SOON, closed.is_set)
            game = Game([], unroll_length=2)
            at_the_end.callback(Background(self._count, game).result)
            at_the_end.callback(game.end)
            at_the_end.callback(game.close)
            run = Background(door.follow, game.pool, 1, 1000, closed)
            at_the_end.callback(run.result)
            at_the_end.callback(closed.set)
            yield

    def session(self, rng: random.Random) -> str:
        """Plays one session; returns how it ended."""
        while len(self._silent) > rng.randrange(8):
            self._silent.popleft().__exit__()
        token = _TOKEN if rng.random() < 0.95 else rng.choice(["", "another-token-of-this-test"])
        stream = RawStream(self._address, "Join", _LEARNER, token)
        self._silent.append(stream)
        messages = self._messages(rng)
        heard = messages[: rng.randrange(len(messages) + 1)] if rng.random() < 0.3 else messages
        return _played(stream, heard, STATUSES | REFUSALS, leaves=rng.random() < 0.3)

    def check(self) -> None:
        """The host that plays goes on, and another one is served."""
        taken, before = threading.Event(), self._rollouts
        with self._sound_host(taken):
            assert taken.wait(SOON)
            wait_for(lambda: self._rollouts > before + 2)

    def _messages(self, rng: random.Random) -> list[bytes]:
        teller = hostile.Calm() if rng.random() < 0.8 else rng
        name = b"hostile" if rng.random() < 0.9 else rng.choice(hostile.KEYS)
        said = wire.chunk(1, hostile.description(teller, _NUM_ENVS)) + wire.chunk(2, name)
        steps = _messages(rng, lambda rng: hostile.vector_step(rng, _NUM_ENVS))
        messages = [wire.chunk(1, said), *(wire.chunk(2, step) for step in steps)]
        if rng.random() < 0.1:
            messages.append(wire.chunk(3, rng.choice(hostile.KEYS)))
        if rng.random() < 0.1:
            rng.shuffle(messages)
        return [hostile.spoilt(rng, message) for message in messages] if teller is rng else messages

    @contextlib.contextmanager
    def _sound_host(self, taken: threading.Event | None = None) -> Iterator[None]:
        host = Host(
            Frames,
            self._address,
            description=_SAID,
            name="sound",
            credentials=Credentials(token=_TOKEN),
        )
        playing = Background(host.play, SOON, threading.Event().set if taken is None else taken.set)
        try:
            yield
        finally:
            host.stop()
            playing.result()

    def _count(self, game: Game) -> None:
        for _ in game.queue:
            self._rollouts += 1


class HostSessions:
    """Learners that send nonsense to a host that dials in."""

    def __init__(self, folder: Path) -> None:
        self._address = f"unix:{folder}/learner"
        self._actions: list[bytes] = []
        self._status = grpc.StatusCode.OK

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with raw_server(self._address, service=_LEARNER, Join=self._join):
            yield

    def session(self, rng: random.Random) -> str:
        """Plays one session; returns how it ended."""
        seeds = _messages(rng, hostile.seed, most=1)
        actions = _messages(rng, lambda rng: hostile.vector_action(rng, _NUM_ENVS))
        self._actions = [*seeds, *actions]
        self._status = rng.choice(list(grpc.StatusCode))
        try:
            Host(Frames, self._address, description=_SAID, name="sound").play(SOON)
        except ERRORS as error:
            return type(error).__name__
        if self._status is not grpc.StatusCode.OK:
            raise Finding(f"a run that has ended with {self._status}")
        return "OK"

    def check(self) -> None:
        """Each session has a host of its own: there is none to check."""

    def _join(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.set_code(self._status)
        context.set_details("\x00 said by this test \n")
        for action in self._actions:
            if next(requests, None) is None:
                return
            yield action


PEERS = {
    "server": ServerSessions,
    "learner": LearnerSessions,
    "door": JoinServerSessions,
    "host": HostSessions,
}


def _played(
    stream: RawStream,
    messages: list[bytes],
    statuses: set[grpc.StatusCode],
    unasked: int = 0,
    leaves: bool = False,
) -> str:
    """Sends the messages, each after the answer to the one before; returns how the stream ended.

    unasked: messages that the other end sends first. leaves: the stream is left as it is then.
    """
    try:
        for _ in range(unasked):
            stream.read()
        for message in messages:
            stream.send(message)
            stream.read()
    except StopIteration:
        pass
    except grpc.RpcError as error:
        return _known(error.code(), statuses)
    if leaves:
        return "left"
    stream.half_close()
    return _known(stream.end()[0], statuses)


def _messages(
    rng: random.Random, make: Callable[[random.Random], bytes], most: int = 6
) -> list[bytes]:
    """Returns some messages: sound ones, then others."""
    count = rng.randint(1, most)
    sound = rng.randint(0, count)
    return [make(hostile.Calm() if number < sound else rng) for number in range(count)]


def _known(code: Any, statuses: set[grpc.StatusCode]) -> str:
    if code not in statuses:
        raise Finding(f"a stream ended with {code}")
    return str(code.name)


def fuzz(
    sessions: Any, seconds: float, seed: int, first: int, most: int | None = None
) -> Counter[str]:
    """Plays `most` sessions, or as many as there is time for; returns how they ended."""
    ends: Counter[str] = Counter()
    until, memory = time.monotonic() + seconds, Memory()
    with sessions.running():
        number = first
        while time.monotonic() < until if most is None else number < first + most:
            if number % _CHECK_EVERY == 0:
                print(f"session {number}", file=sys.stderr, flush=True)
                sessions.check()
            try:
                ends[sessions.session(random.Random(f"{seed} {number}"))] += 1
                memory.look()
                if number % _CHECK_EVERY == 0:
                    memory.check_growth()
            except Finding as finding:
                raise Finding(f"session {number} of seed {seed}: {finding}") from finding
            number += 1
            if number == first + _WARM_UP:
                memory.has_warmed_up()
        sessions.check()
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    keep_free_memory_in_few_places()
    with tempfile.TemporaryDirectory() as folder:
        sessions = PEERS[given.peer](Path(folder))
        try:
            ends = fuzz(sessions, given.seconds, given.seed, given.first, given.sessions)
        except Finding as finding:
            print(finding, file=sys.stderr)
            return 1
    print(json.dumps(ends))
    return 0


if __name__ == "__main__":
    sys.exit(main())
