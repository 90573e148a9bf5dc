# SPDX-License-Identifier: Apache-2.0
"""Hosts that dial in: `Host` at one end, `Door` and `ActorPool` at the other, and hostile peers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import wire
from background import SOON, Background, wait_for
from keys_of_tests import Keys
from later import later
from peers import RawStream, raw_server
from ports import free_port
from served_envs import EPISODE_LENGTH, VecStep, Vector
from serving import Game
from strangers import CASES, check_unharmed
from wire import INT32, INT64

from libtorchbeast import Credentials, Door, Host, describe, server_status
from torchbeast.servers.security import credentials as credentials_of

E = Vector.num_envs
SAID: dict[str, Any] = {
    "env_id": "Vector",
    "num_envs": E,
    "num_streams": 1,
    "frame_stack": 1,
    "observation": ("int32", (1,)),
    "action_space": {"type": "Discrete", "n": 2},
}
TOKEN = Credentials(token="a-token-of-this-test")


@contextlib.contextmanager
def door_at(address: str, **options: Any) -> Iterator[Door]:
    door = Door(address, **options)
    try:
        yield door
    finally:
        door.close(run_has_ended=False)


@contextlib.contextmanager
def hosting(
    address: str, env_class: Callable[[], Any] = Vector, name: str = "a", **options: Any
) -> Iterator[Background[None]]:
    """Lets a host play one stream."""
    host = Host(env_class, address, description=SAID, name=name, **options)
    run = Background(host.play, SOON)
    try:
        yield run
    finally:
        host.stop()
        with contextlib.suppress(Exception):
            run.result()


@contextlib.contextmanager
def pool_of_hosts(**options: Any) -> Iterator[Game]:
    """Runs a pool without streams of its own, whose end may be a failure."""
    game = Game([], **options)
    try:
        yield game
    finally:
        game.close()
        with contextlib.suppress(Exception):
            game.end()


def waiting(door: Door) -> tuple[int, str, dict[str, Any]]:
    found = door.next(SOON)
    assert found is not None
    return found


def take(door: Door, game: Game) -> str:
    """Lets the pool play the next stream; returns its host."""
    number, host, _ = waiting(door)
    door.take(number, game.pool)
    return host


def test_a_host_is_described_and_then_played_as_a_server_would_be(address: str) -> None:
    with door_at(address) as door, hosting(address), pool_of_hosts() as game:
        number, host, said = waiting(door)
        assert host == "a" and {key: said[key] for key in SAID} == SAID
        assert door.waits(number) and door.next(0.0) is None, "each stream is offered once"
        door.take(number, game.pool)
        (((observation, reward, done, steps, returns), _), _), info = game.rollout()
        assert not door.waits(number)
    assert observation[:, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert observation[0, :, 0].tolist() == [0, 10, 20]
    assert reward[1:].numpy().tolist() == [[2.0] * E] * 4
    assert done[:, 0].tolist() == [True, False, False, True, False]
    assert steps[EPISODE_LENGTH, 0] == EPISODE_LENGTH and returns[EPISODE_LENGTH, 0] == 6.0
    assert info["stream"].tolist() == [[0, 1, 2]] and info["rollout"].tolist() == [[0, 0, 0]]


def test_streams_of_two_hosts_have_environments_and_seeds_of_their_own(address: str) -> None:
    seeds: set[int] = set()

    class Seeded(Vector):
        def reset(self, seed: int) -> Any:
            seeds.add(seed)
            return super().reset(seed)

    with (
        door_at(address) as door,
        hosting(address, Seeded, "a"),
        hosting(address, Seeded, "b"),
        pool_of_hosts() as game,
    ):
        assert {take(door, game), take(door, game)} == {"a", "b"}
        found: set[int] = set()
        while len(found) < 2:
            found.add(int(game.rollout()[1]["stream"][0, 0]))
        assert sorted((host, streams, envs) for host, streams, envs in door.hosts()) == [
            ("a", 1, E),
            ("b", 1, E),
        ]
        status = server_status(address, SOON)
    assert len(seeds) == 2
    assert status["open_streams"] == 2
    assert [row[:3] for row in status["hosts"]] == [("a", 1, E), ("b", 1, E)]


def test_a_host_ends_in_order_once_the_run_has_ended(address: str) -> None:
    with door_at(address) as door, hosting(address) as playing, pool_of_hosts() as game:
        with hosting(address, name="waiting") as other:
            take(door, game), waiting(door)
            game.rollout()
            game.close()
            door.close(run_has_ended=True)
            playing.result(), other.result()


def test_a_host_in_the_middle_of_a_step_hears_that_the_run_has_ended(address: str) -> None:
    stepping, go_on = threading.Event(), threading.Event()

    class Slow(Vector):
        def step(self, action: Any) -> VecStep:
            stepping.set()
            go_on.wait(SOON)
            return super().step(action)

    with door_at(address) as door, hosting(address, Slow) as playing, pool_of_hosts() as game:
        take(door, game)
        assert stepping.wait(SOON)
        game.close()
        game.end()
        closing = Background(lambda: door.close(run_has_ended=True))
        assert door.next(SOON) is None, "it is closed"
        go_on.set()
        playing.result(), closing.result()


def test_a_host_may_dial_again_after_a_learner_that_only_stopped(address: str) -> None:
    with door_at(address) as door, hosting(address) as playing, pool_of_hosts() as game:
        take(door, game)
        game.rollout()
        game.close()
        door.close(run_has_ended=False)
        with pytest.raises(ConnectionError, match="the learner has stopped"):
            playing.result()


def test_a_host_that_leaves_loses_its_unfinished_rollout_and_the_run_continues(
    address: str,
) -> None:
    with door_at(address) as door, hosting(address, name="stays"), pool_of_hosts() as game:
        take(door, game)
        with hosting(address, name="leaves"):
            take(door, game)
            wait_for(lambda: {row[0] for row in door.hosts()} == {"stays", "leaves"})
            wait_for(lambda: game.rollout()[1]["stream"][0, 0] > 0)
        wait_for(lambda: game.rollout() and [row[0] for row in door.hosts()] == ["stays"])
        (ended,) = door.ended()
        assert ended[0] == "leaves" and "it has left" in ended[1]
        assert game.pool.lost_streams() == 1
        with hosting(address, name="leaves"):
            take(door, game)
            own = 2 << 16  # a stream that comes back has environments that nobody had before
            wait_for(lambda: game.rollout()[1]["stream"][0, 0] == own)


def test_a_run_that_no_host_is_left_for_ends_after_the_reconnect_timeout(address: str) -> None:
    with door_at(address) as door, pool_of_hosts(reconnect_timeout_s=2.0) as game:
        with hosting(address):
            take(door, game)
            game.rollout()
        with pytest.raises(ConnectionError, match=r"0 of 0 streams are connected.*it has left"):
            while True:  # a stream whose rollout has no room would not notice that its host left
                game.rollout()


def test_an_environment_that_fails_is_told_to_both_ends_with_its_traceback(address: str) -> None:
    class Failing(Vector):
        def step(self, action: Any) -> VecStep:
            raise ArithmeticError("of this test")

    with door_at(address) as door, hosting(address, Failing) as playing, pool_of_hosts() as game:
        take(door, game)
        with pytest.raises(RuntimeError, match="ArithmeticError: of this test"):
            playing.result()
        wait_for(lambda: game.pool.restarted_streams() == 1)
        ended: list[tuple[str, str]] = []
        wait_for(lambda: bool(ended.extend(door.ended()) or ended))
        assert "ArithmeticError: of this test" in ended[0][1]
        with hosting(address):  # the run continues
            take(door, game)
            game.rollout()


def test_a_step_that_takes_too_long_ends_the_stream_only(address: str) -> None:
    go_on = threading.Event()

    class Hanging(Vector):
        def step(self, action: Any) -> VecStep:
            go_on.wait(SOON)
            return super().step(action)

    with door_at(address, step_timeout_s=1.0) as door, pool_of_hosts() as game:
        with hosting(address, Hanging):
            take(door, game)
            ended: list[tuple[str, str]] = []
            wait_for(lambda: bool(ended.extend(door.ended()) or ended))
            go_on.set()
        assert "sent no step within" in ended[0][1]
        with hosting(address):
            take(door, game)
            game.rollout()


def test_a_stream_is_not_given_to_nobody(address: str) -> None:
    with door_at(address) as door, pytest.raises(TypeError):
        door.take(0, None)  # type: ignore[arg-type]


def test_a_stream_that_is_refused_hears_the_reason(address: str) -> None:
    with door_at(address) as door, hosting(address) as playing:
        door.refuse(waiting(door)[0], "it serves Catch")
        with pytest.raises(ConnectionError, match=r"does not use this host.*it serves Catch"):
            playing.result()


def test_a_host_that_leaves_before_it_is_taken_waits_no_more(address: str) -> None:
    with door_at(address) as door:
        with hosting(address):
            number, *_ = waiting(door)
        wait_for(lambda: not door.waits(number))


def test_without_the_token_nothing_is_read_and_the_host_hears_why(address: str) -> None:
    with door_at(address, credentials=TOKEN) as door:
        with (
            hosting(address, credentials=Credentials(token="another-token")) as playing,
            pytest.raises(PermissionError, match="not its token"),
        ):
            playing.result()
        for method, service in (("Join", LEARNER), ("Check", "grpc.health.v1.Health")):
            with RawStream(address, method, service) as stranger:
                assert stranger.end()[0] is grpc.StatusCode.UNAUTHENTICATED
        with hosting(address, credentials=TOKEN):
            assert waiting(door)[1] == "a"


def test_an_environment_server_and_a_learner_are_told_apart(address: str) -> None:
    with door_at(address), pytest.raises(ValueError, match="a learner that hosts dial in to"):
        describe(address, SOON)


@pytest.mark.parametrize(("attack", "protection"), [later("messages", "token"), *CASES[1:]])
def test_strangers_do_not_harm_the_streams_of_hosts(
    attack: str, protection: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    address = f"127.0.0.1:{free_port()}"
    own, of_hosts = map(credentials_of, Keys(tmp_path).ends(protection))
    with (
        door_at(address, credentials=own) as door,
        hosting(address, credentials=of_hosts),
        hosting(address, credentials=of_hosts),
        pool_of_hosts() as game,
    ):
        take(door, game), take(door, game)
        check_unharmed(game, address, attack, protection != "token", pytestconfig)


# ---- Hostile hosts -------------------------------------------------------------------------------

LEARNER = "rpcenv.RPCLearner"
SPEC = wire.leaf(INT32, (1,))
OBSERVATION = wire.leaf(INT32, (E, 1), bytes(4 * E))
STEP = wire.vector_step(E, observation=OBSERVATION)


MEBIBYTE = 1 << 20


def joining(host: bytes = b"x", **said: Any) -> bytes:
    said = {"num_envs": E, "stack": 1, **said}
    return wire.chunk(1, wire.chunk(1, wire.description(SPEC, **said)) + wire.chunk(2, host))


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (b"", "expected a description"),
        (wire.chunk(2, STEP), "expected a description"),
        (b"\xff", "expected a description"),
        (wire.chunk(1, b""), "protocol version 0"),
        (joining(num_envs=1 << 20), "number of environments"),
        (joining(host=b""), "a host's name"),
        (joining(host=b"a\nb"), "a host's name"),
        (joining(host=b"a" * 65), "a host's name"),
        (joining(options=bytes(MEBIBYTE + 1)), "got 1048577 bytes of text, expected at most"),
        (joining() + wire.chunk(99, bytes(8 * MEBIBYTE)), "a description of at most 8 MiB"),
    ],
)
def test_a_first_message_that_is_no_description_ends_the_stream(
    address: str, first: bytes, reason: str
) -> None:
    with door_at(address) as door:
        with RawStream(address, "Join", LEARNER) as stream:
            stream.send(first)
            code, details = stream.end()
        assert code is grpc.StatusCode.INVALID_ARGUMENT and reason in details
        with hosting(address):
            assert waiting(door)[1] == "a", "others are not disturbed"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\xff", "it has left"),
        (b"", "no message of the protocol"),
        (joining(), "no message of the protocol"),
        (wire.chunk(2, b""), "none of them"),
        (wire.chunk(2, wire.vector_step(E + 1, observation=OBSERVATION)), "got float32"),
        (wire.chunk(3, b"a failure"), "a failure"),
    ],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["first step", "later step"])
def test_what_is_no_step_ends_the_stream_and_not_the_run(
    address: str, message: bytes, reason: str, is_first: bool
) -> None:
    with door_at(address) as door, pool_of_hosts() as game:
        with RawStream(address, "Join", LEARNER) as stream:
            stream.send(joining())
            take(door, game)
            stream.read()
            if not is_first:
                stream.send(wire.chunk(2, STEP))
                stream.read()
            stream.send(message)
            code, _ = stream.end()
        assert code is grpc.StatusCode.ABORTED
        ((host, why),) = door.ended()
        assert host == "x" and reason in why
        with hosting(address):
            take(door, game)
            game.rollout()


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_an_observation_that_is_not_finite_ends_the_stream_and_not_the_run(
    address: str, kind: str, value: float
) -> None:
    """Hosts check it too, but other programs than ours may dial."""
    numbers = np.zeros((E, 1), kind)
    dtype = numbers.dtype.num
    steps = []
    for last in (0.0, value):
        numbers[-1] = last
        observation = wire.leaf(dtype, (E, 1), numbers.tobytes())
        steps.append(wire.chunk(2, wire.vector_step(E, observation=observation)))
    said = wire.description(wire.leaf(dtype, (1,)), num_envs=E, stack=1)
    with door_at(address) as door, pool_of_hosts() as game:
        with RawStream(address, "Join", LEARNER) as stream:
            stream.send(wire.chunk(1, wire.chunk(1, said) + wire.chunk(2, b"x")))
            take(door, game)
            for step in steps:
                stream.read()
                stream.send(step)
            assert stream.end()[0] is grpc.StatusCode.ABORTED
        ((_, why),) = door.ended()
        assert "expected finite numbers" in why


def test_a_host_that_speaks_before_it_is_asked_is_let_go(address: str) -> None:
    with door_at(address) as door, RawStream(address, "Join", LEARNER) as stream:
        stream.send(joining())
        number, *_ = waiting(door)
        stream.send(wire.chunk(2, STEP))
        assert stream.end()[0] is grpc.StatusCode.CANCELLED
        assert not door.waits(number)


def test_silent_streams_take_no_place_from_hosts_for_long(address: str) -> None:
    def one_too_many() -> bool:
        with RawStream(address, "Join", LEARNER) as more:
            more.send(joining())
            more.half_close()
            return more.end()[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    def are_enough() -> bool:
        # The door ends them after 10 s, which a busy machine may need to open them all.
        with contextlib.ExitStack() as silent:
            calls = [silent.enter_context(RawStream(address, "Join", LEARNER)) for _ in range(64)]
            if not any(one_too_many() for _ in range(20)):
                return False
            calls[0].send(joining(host=b"described"))
            return waiting(door)[1] in ("described", "x")

    with door_at(address) as door:
        wait_for(are_enough, timeout=2 * SOON)


def test_descriptions_that_wait_take_64_mebibytes_at_most(address: str) -> None:
    text = b"[]".ljust(MEBIBYTE)
    long = joining(action_space=text, observation_space=text, options=text)
    with door_at(address) as door, contextlib.ExitStack() as streams:
        for _ in range(21):
            streams.enter_context(RawStream(address, "Join", LEARNER)).send(long)
            waiting(door)
        with RawStream(address, "Join", LEARNER) as more:
            more.send(long)
            code, details = more.end()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "descriptions" in details
        with hosting(address):
            assert waiting(door)[1] == "a", "there is room for a short one"


def test_a_host_is_told_the_beginning_of_a_long_refusal(address: str) -> None:
    with door_at(address) as door, hosting(address) as playing:
        door.refuse(waiting(door)[0], "it serves " + "Catch" * MEBIBYTE)
        with pytest.raises(ConnectionError, match=r"does not use this host.*it serves CatchCatch"):
            playing.result()


def test_a_host_leaves_a_learner_that_never_ends_its_stream(address: str) -> None:
    class Failing(Vector):
        def step(self, action: Any) -> VecStep:
            raise ArithmeticError("of this test")

    def endless(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        next(requests)
        yield wire.number(1, 5)  # a seed
        next(requests)
        while True:
            yield wire.chunk(2, wire.leaf(INT64, (E,), bytes(8 * E)))

    with (
        raw_server(address, service=LEARNER, Join=endless),
        hosting(address, Failing) as playing,
        pytest.raises(RuntimeError, match="ArithmeticError: of this test"),
    ):
        playing.result()


def test_a_closed_door_leaves_no_stream_and_no_wait(address: str) -> None:
    door = Door(address)
    nobody = Background(door.next, SOON)
    with RawStream(address, "Join", LEARNER) as silent, pool_of_hosts() as game:
        with RawStream(address, "Join", LEARNER) as played:
            played.send(joining())
            wait_for(lambda: nobody.ended)
            found = nobody.result()
            assert found is not None
            door.take(found[0], game.pool)
            played.read()
            game.close()
            door.close(run_has_ended=False)
            assert played.end()[0] is grpc.StatusCode.UNAVAILABLE
        assert silent.end()[0] is not grpc.StatusCode.OK
    assert door.next(SOON) is None


def test_a_host_that_is_stopped_ends_whatever_it_waits_for(address: str) -> None:
    host = Host(Vector, address, description=SAID, name="a")
    nobody_listens = Background(host.play, SOON)
    host.stop()
    nobody_listens.result()
    with door_at(address) as door:
        waits = Host(Vector, address, description=SAID, name="a")
        run = Background(waits.play, SOON)
        waiting(door)
        waits.stop()
        run.result()
        waits.play(SOON)
