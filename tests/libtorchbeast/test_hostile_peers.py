# SPDX-License-Identifier: Apache-2.0
"""Peers that send invalid messages: their stream ends with the reason, and nothing else does."""

from __future__ import annotations

import contextlib
import queue
import random
import re
import select
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import wire
from background import SOON, wait_for
from keys_of_tests import Keys
from peers import SERVICE, RawStream, Script, raw_server
from ports import free_port
from served_envs import Counting, Vector
from serving import Game, playing, served_elsewhere, serving
from strangers import CASES, check_unharmed, unread_calls
from wire import BOOL, FLOAT32, INT32, INT64, UINT8

from libtorchbeast import Credentials, Server, describe
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.security import credentials as credentials_of

MIB = 1 << 20

# ArrayNests that cannot be one, with a part of the reason.
BAD_NESTS = {
    "nothing": (b"", "none of them"),
    "an empty array": (wire.chunk(1, b""), "needs 1 bytes, got 0"),
    "unknown dtype": (wire.leaf(13, (1, 1), bytes(16)), "dtype number 13"),
    "object array": (wire.leaf(17, (1, 1), bytes(8)), "dtype number 17"),
    "negative dtype": (wire.leaf(-1, (1, 1), bytes(8)), "dtype number -1"),
    "negative size": (wire.leaf(INT64, (1, -1), bytes(8)), "dimension -1"),
    "two negative sizes": (wire.leaf(INT64, (-1, -1), bytes(8)), "dimension -1"),
    "huge size": (wire.leaf(UINT8, (1 << 62, 1), b"x"), "larger than a message"),
    "sizes that overflow to zero": (wire.leaf(UINT8, (1 << 32, 1 << 32)), "larger than a message"),
    "sizes that overflow to one": (
        wire.leaf(UINT8, (3, 0xAAAAAAAAAAAAAAAB), b"x"),
        "larger than a message|negative",
    ),
    "a gigabyte that is not there": (wire.leaf(UINT8, (1024, MIB)), "larger than a message"),
    "too few bytes": (wire.leaf(INT64, (1, 1), bytes(7)), "needs 8 bytes, got 7"),
    "no bytes": (wire.leaf(INT64, (1, 1)), "needs 8 bytes, got 0"),
    "too many bytes": (wire.leaf(INT64, (1, 1), bytes(9)), "needs 8 bytes, got 9"),
    "bytes for a size of zero": (wire.leaf(INT64, (1, 1, 0), b"x"), "needs 0 bytes, got 1"),
    "many dimensions": (wire.leaf(UINT8, [1] * 1000, b"x"), "1000 dimensions"),
    "an empty entry": (wire.vector(wire.leaf(UINT8, (1, 1), b"x"), b""), "none of them"),
    "an empty entry of a map": (wire.mapping(a=b""), "none of them"),
}
SOME = [BAD_NESTS[name] for name in ("nothing", "negative size", "too few bytes")]


def nested(depth: int) -> bytes:
    """Returns an array in `depth` vectors."""
    nest = wire.leaf(INT64, (1, 1), bytes(8))
    for _ in range(depth):
        nest = wire.vector(nest)
    return nest


class TestLearnersOfOurServer:
    @pytest.fixture(autouse=True)
    def served(self, address: str) -> Iterator[None]:
        """Checks after every test that the server still serves others."""
        with serving(Counting, address):
            yield
            with playing([address]) as game:
                game.rollout()

    def answer(self, address: str, message: bytes) -> tuple[grpc.StatusCode, str]:
        """Returns how the server ends a stream after this first action."""
        with RawStream(address) as stream:
            stream.read()
            stream.send(message)
            return stream.end()

    @pytest.mark.parametrize(("nest", "reason"), BAD_NESTS.values(), ids=BAD_NESTS.keys())
    def test_an_action_that_is_no_nest_is_an_invalid_argument(
        self, nest: bytes, reason: str, address: str
    ) -> None:
        with playing([address]) as another:
            code, details = self.answer(address, wire.action(nest))
            another.rollouts(2)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(reason, details), details

    @pytest.mark.parametrize(("nest", "reason"), SOME)
    def test_an_action_that_is_no_nest_on_a_vector_stream_is_an_invalid_argument(
        self, nest: bytes, reason: str, address: str
    ) -> None:
        with RawStream(address, "StreamingVectorEnv") as stream:
            stream.send(wire.vector_action(seed=3))
            stream.read()
            stream.send(wire.vector_action(nest))
            code, details = stream.end()
        assert code is grpc.StatusCode.INVALID_ARGUMENT, details

    def test_an_action_message_without_an_action_is_an_invalid_argument(self, address: str) -> None:
        assert self.answer(address, b"")[0] is grpc.StatusCode.INVALID_ARGUMENT

    @pytest.mark.parametrize("shape", [(), (1,), (2, 1), (1, 2), (0, 1)])
    def test_an_action_that_loses_its_leading_dimensions_is_an_invalid_argument(
        self, shape: tuple[int, ...], address: str
    ) -> None:
        with RawStream(address) as stream:
            stream.read()
            stream.send(wire.action(wire.leaf(UINT8, (1, 1), bytes(1))))
            stream.read()
            data = bytes(int(np.prod(shape)))
            stream.send(wire.action(wire.leaf(UINT8, shape, data)))
            code, details = stream.end()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "must begin with [1, 1]" in details

    @pytest.mark.parametrize("depth", [60, 300, 5000])
    def test_a_deeply_nested_action_does_not_crash_the_server(
        self, depth: int, address: str
    ) -> None:
        with RawStream(address) as stream:
            stream.read()
            stream.send(wire.action(nested(depth)))
            stream.half_close()
            with pytest.raises((grpc.RpcError, StopIteration)):
                for _ in range(2):
                    stream.read()
            assert stream.end()[0] is not grpc.StatusCode.DEADLINE_EXCEEDED

    @pytest.mark.parametrize("method", ["StreamingEnv", "StreamingVectorEnv"])
    @pytest.mark.parametrize("garbage", [b"\xff", b"\x0a\x7f", bytes(range(256)), b"\x12\xff\xff"])
    def test_bytes_that_are_no_message_end_the_stream(
        self, garbage: bytes, method: str, address: str
    ) -> None:
        with RawStream(address, method) as stream:
            stream.send(garbage)
            with pytest.raises((grpc.RpcError, StopIteration)):
                for _ in range(3):
                    stream.read()
            assert stream.end()[0] is not grpc.StatusCode.DEADLINE_EXCEEDED

    def test_random_messages_do_not_crash_the_server(self, address: str) -> None:
        rng = random.Random(0)
        good = wire.discrete_action(1)
        for _ in range(200):
            message = bytearray(good)
            for _ in range(rng.randint(1, 3)):
                message[rng.randrange(len(message))] = rng.randrange(256)
            with RawStream(address) as stream:
                stream.read()
                stream.send(bytes(message[: rng.randint(1, len(message))]))
                stream.half_close()
                try:
                    stream.read()
                except (grpc.RpcError, StopIteration):
                    continue

    def test_unknown_fields_are_ignored(self, address: str) -> None:
        unknown = wire.number(99, 7) + wire.chunk(100, b"later version")
        with RawStream(address) as stream:
            stream.read()
            stream.send(wire.discrete_action() + unknown)
            stream.read()

    def test_a_learner_that_vanishes_does_not_disturb_others(self, address: str) -> None:
        with playing([address]) as game:
            for _ in range(10):
                with RawStream(address) as stream:
                    stream.read()
                    stream.send(wire.discrete_action())
            game.rollouts(3)

    def test_a_method_that_does_not_exist_is_unimplemented(self, address: str) -> None:
        with RawStream(address, "NoSuchMethod") as stream:
            assert stream.end()[0] is grpc.StatusCode.UNIMPLEMENTED


def test_the_original_protocol_is_refused_by_a_vector_server(address: str) -> None:
    with serving(Vector, address), RawStream(address) as stream:
        code, details = stream.end()
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "3 together" in details


OBSERVATION = wire.leaf(UINT8, (2, 2), bytes(4))
FIRST = wire.step(OBSERVATION, done=True)


def original_game(address: str, *messages: bytes) -> BaseException:
    """Returns the error of a pool whose original server sends these messages."""
    script = Script(messages, speaks_first=True)
    with raw_server(address, StreamingEnv=script):
        return _failure(address)


def vector_game(
    address: str,
    *messages: bytes,
    num_envs: int = 2,
    stack: int = 1,
    info_keywords: tuple[bytes, ...] = (),
) -> BaseException:
    """Returns the error of a pool whose vector server sends these messages."""
    spec = wire.leaf(INT32, (1,))
    answer = wire.description(spec, num_envs=num_envs, stack=stack, info_keywords=info_keywords)
    script = Script(messages, speaks_first=False)
    with raw_server(address, Describe=answer, StreamingVectorEnv=script):
        return _failure(address)


def _failure(address: str, **options: Any) -> BaseException:
    game = Game([address], reconnect_timeout_s=0.0, **options)
    with pytest.raises(Exception) as failure:
        game.end()
    game.close()
    assert address in str(failure.value)
    return failure.value


class TestServersOfOurLearner:
    @pytest.mark.parametrize(("nest", "reason"), SOME)
    @pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
    def test_an_observation_that_is_no_nest_is_a_value_error(
        self, nest: bytes, reason: str, first: bool, address: str
    ) -> None:
        bad = wire.step(nest, done=first)
        error = original_game(address, *([bad] if first else [FIRST, bad]))
        assert type(error) is ValueError
        assert re.search(reason, str(error)), error

    @pytest.mark.parametrize(
        ("later", "text"),
        [
            (wire.leaf(UINT8, (2, 3), bytes(6)), r"uint8\[1, 2, 2\].* got uint8\[1, 2, 3\]"),
            (wire.leaf(BOOL, (2, 2), bytes(4)), r"uint8\[1, 2, 2\].* got bool\[1, 2, 2\]"),
            (wire.vector(OBSERVATION), "nests don't match"),
            (wire.mapping(a=OBSERVATION), "nests don't match"),
        ],
    )
    def test_an_observation_that_changes_is_a_value_error(
        self, later: bytes, text: str, address: str
    ) -> None:
        error = original_game(address, FIRST, wire.step(later))
        assert isinstance(error, ValueError) and re.search(text, str(error))

    @pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
    def test_a_reward_that_is_no_number_is_a_value_error(self, reward: float, address: str) -> None:
        error = original_game(address, FIRST, wire.step(OBSERVATION, reward))
        assert isinstance(error, ValueError) and "finite number" in str(error)

    @pytest.mark.parametrize(
        ("replaced", "text"),
        [
            ({"reward": wire.array(FLOAT32, (3,), bytes(12))}, r"float32\[2\], got float32\[3\]"),
            ({"reward": wire.array(INT32, (2,), bytes(8))}, r"float32\[2\], got int32\[2\]"),
            ({"reward": b""}, "reward|bytes"),
            ({"reward": wire.array(FLOAT32, (2,), struct.pack("<2f", 0, np.nan))}, "environment 1"),
            ({"terminated": wire.array(UINT8, (2,), bytes(2))}, r"bool\[2\], got uint8\[2\]"),
            ({"truncated": wire.array(BOOL, (2, 1), bytes(2))}, r"bool\[2\], got bool\[2, 1\]"),
            ({"episode_end": wire.array(BOOL, (), b"\0")}, r"bool\[2\], got bool\[\]"),
            ({"episode_step": wire.array(INT64, (2,), bytes(16))}, r"int32\[2\], got int64\[2\]"),
            ({"episode_return": wire.array(FLOAT32, (0,))}, r"float32\[2\], got float32\[0\]"),
            ({"observation": wire.leaf(INT32, (3, 1), bytes(12))}, r"int32\[2, 1\]"),
            ({"truncated": wire.array(BOOL, (2,), b"\1\0")}, "no final observation"),
            (
                {
                    "truncated": wire.array(BOOL, (2,), b"\1\0"),
                    "final_observation": wire.leaf(INT32, (2, 1), bytes(8)),
                },
                r"int32\[1, 1\].* got int32\[2, 1\]",
            ),
            (
                {"final_observation": wire.leaf(INT32, (2, 1), bytes(8))},
                r"int32\[0, 1\].* got int32\[2, 1\]",
            ),
        ],
    )
    @pytest.mark.parametrize(("first", "stack"), [(True, 1), (False, 4)])
    def test_an_invalid_vector_step_is_a_value_error(
        self, replaced: dict[str, bytes], text: str, first: bool, stack: int, address: str
    ) -> None:
        good = wire.vector_step(2, observation=wire.leaf(INT32, (2, 1), bytes(8)))
        bad = wire.vector_step(2, **{"observation": wire.leaf(INT32, (2, 1), bytes(8))} | replaced)
        error = vector_game(address, *([bad] if first else [good, bad]), stack=stack)
        assert isinstance(error, ValueError)
        assert re.search(text, str(error)), error

    @pytest.mark.parametrize(
        ("keywords", "text"),
        [
            ([b"%d" % k for k in range(257)], "info keywords must lie between 0 and 256, got 257"),
            ([b"x", b""], "keyword has 0 bytes"),
            ([b"x" * 257], "keyword has 257 bytes, expected 1 to 256"),
            ([b"x", b"a\nb"], "keyword has a comma or a control character"),
            ([b"x", b"x"], "keyword x comes twice"),
            ([b"\xff\xfe"], "environment server at"),  # no UTF-8: to gRPC it is no message
        ],
    )
    def test_keywords_of_an_info_that_make_no_sense_end_the_run(
        self, keywords: list[bytes], text: str, address: str
    ) -> None:
        good = wire.vector_step(2, observation=wire.leaf(INT32, (2, 1), bytes(8)))
        error = vector_game(address, good, info_keywords=tuple(keywords))
        assert re.search(text, str(error)), error

    @pytest.mark.parametrize(
        ("info", "got"),
        [
            (b"", "got none"),
            (wire.array(FLOAT32, (1, 3), bytes(12)), r"got float32\[1, 3\]"),
            (wire.array(FLOAT32, (2, 2), bytes(16)), r"got float32\[2, 2\]"),
            (wire.array(FLOAT32, (2,), bytes(8)), r"got float32\[2\]"),
            (wire.array(INT32, (1, 2), bytes(8)), r"got int32\[1, 2\]"),
            (wire.array(FLOAT32, (1, 2), bytes(7)), "needs 8 bytes, got 7"),
            (wire.array(FLOAT32, (1, -2), bytes(8)), "dimension -2 is negative"),
            (wire.array(FLOAT32, (1, 1 << 40)), "larger than a message may be"),
        ],
    )
    def test_an_invalid_info_is_a_value_error(self, info: bytes, got: str, address: str) -> None:
        observation = wire.leaf(INT32, (2, 1), bytes(8))
        good = wire.vector_step(2, observation=observation)
        ended = wire.array(BOOL, (2,), b"\0\1")
        bad = wire.vector_step(2, observation=observation, episode_end=ended, info=info)
        error = vector_game(address, good, bad, info_keywords=(b"score", b"laps"))
        assert isinstance(error, ValueError) and re.search(got, str(error)), error

    def test_an_info_without_a_keyword_is_a_value_error(self, address: str) -> None:
        step = wire.vector_step(
            2,
            observation=wire.leaf(INT32, (2, 1), bytes(8)),
            episode_end=wire.array(BOOL, (2,), b"\0\1"),
            info=wire.array(FLOAT32, (1, 1), bytes(4)),
        )
        error = vector_game(address, step)
        assert isinstance(error, ValueError) and "expected float32[1, 0]" in str(error)

    def test_frames_without_a_channel_dimension_cannot_be_stacked(self, address: str) -> None:
        answer = wire.description(wire.leaf(INT32, ()), stack=4)
        good = wire.vector_step(1, observation=wire.leaf(INT32, (1,), bytes(4)))
        script = Script([good], speaks_first=False)
        with raw_server(address, Describe=answer, StreamingVectorEnv=script):
            assert "channel dimension" in str(_failure(address))

    @pytest.mark.parametrize("garbage", [b"\xff", b"\x0a\x7f", bytes(range(256))])
    def test_bytes_that_are_no_message_end_the_run(self, garbage: bytes, address: str) -> None:
        error = original_game(address, garbage)
        assert isinstance(error, ValueError) and "no message of the protocol" in str(error)

    @pytest.mark.parametrize("garbage", [b"\xff", b"\x0a\x7f", bytes(range(256))])
    @pytest.mark.parametrize("floods", [False, True], ids=["then silence", "then a flood"])
    def test_bytes_that_are_no_message_after_a_good_step_end_the_run(
        self, garbage: bytes, floods: bool, address: str
    ) -> None:
        class Peer(Script):
            def __call__(self, requests: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
                yield FIRST
                if next(requests, None) is None:  # it only wanted to see what is served
                    return
                yield garbage
                while floods and context.is_active():
                    yield FIRST
                gone = threading.Event()
                if context.add_callback(gone.set):
                    gone.wait(SOON)

        with raw_server(address, StreamingEnv=Peer([], speaks_first=True)):
            error = _failure(address, step_timeout_s=0.3)
        assert isinstance(error, ValueError) and "no message of the protocol" in str(error)

    def test_observations_may_be_nested(self, address: str) -> None:
        messages = [wire.step(nested(30), done=True)] * 3
        with raw_server(address, StreamingEnv=Script(messages, speaks_first=True)):
            with playing([address], unroll_length=2) as game:
                observation = game.rollout()[0][0][0][0]
        for _ in range(30):
            [observation] = observation
        assert observation.shape == (3, 1, 1, 1)

    @pytest.mark.parametrize("depth", [300, 5000])
    def test_deep_nesting_does_not_crash_the_learner(self, depth: int, address: str) -> None:
        error = original_game(address, wire.step(nested(depth), done=True))
        assert isinstance(error, ValueError)

    def test_any_nonzero_byte_of_a_bool_is_true(self, address: str) -> None:
        seen: list[Any] = []

        def agent(inputs: Any) -> Any:
            seen.append(inputs[0][0].clone())
            return (np.zeros((1, 1), np.int64),), ()

        first = wire.step(wire.leaf(BOOL, (4,), b"\0\1\2\xff"), done=True)
        script = Script([first], speaks_first=True)
        with raw_server(address, StreamingEnv=script), playing([address], agent):
            wait_for(lambda: seen)
        assert seen[0].numpy().view(np.uint8).tolist() == [[[0, 1, 1, 1]]]

    @pytest.mark.parametrize(
        ("code", "kind"),
        [
            (grpc.StatusCode.INTERNAL, RuntimeError),
            (grpc.StatusCode.INVALID_ARGUMENT, ValueError),
            (grpc.StatusCode.UNAVAILABLE, ConnectionError),
            (grpc.StatusCode.UNKNOWN, RuntimeError),
            (grpc.StatusCode.CANCELLED, ConnectionError),
        ],
    )
    def test_a_servers_own_reason_is_passed_on(
        self, code: grpc.StatusCode, kind: type[Exception], address: str
    ) -> None:
        class Breaks(Script):
            def __call__(
                self, requests: Iterator[bytes], context: grpc.ServicerContext
            ) -> Iterator[bytes]:
                yield FIRST
                next(requests)
                context.abort(code, "the reason")

        with raw_server(address, StreamingEnv=Breaks([], speaks_first=True)):
            error = _failure(address)
        assert type(error) is kind and "the reason" in str(error)


class TestLargeMessages:
    """The limit of messages is 256 MiB, not gRPC's own of 4 MiB."""

    @pytest.mark.parametrize("size", [5 * MIB, 40 * MIB])
    def test_observations_above_4_mib_are_accepted(self, size: int, address: str) -> None:
        class Large(Counting):
            def observation(self) -> Any:
                return np.full(size, self.time, np.uint8)

        with serving(Large, address), playing([address], unroll_length=2, queue_size=1) as game:
            nest, _ = game.rollout()
        assert nest[0][0][0][:, 0, -1].tolist() == [0, 1, 2]

    def test_actions_above_4_mib_are_accepted(self, address: str) -> None:
        sizes = []

        class Env(Counting):
            def step(self, action: Any) -> Any:
                sizes.append(action.nbytes)
                return super().step(action)

        def agent(inputs: Any) -> Any:
            return (np.zeros((1, 1, 5 * MIB), np.uint8),), ()

        with serving(Env, address), playing([address], agent, unroll_length=1) as game:
            game.rollout()
        assert sizes[0] == 5 * MIB

    def test_observations_above_4_mib_of_an_original_server_are_accepted(
        self, address: str
    ) -> None:
        messages = [wire.step(wire.leaf(UINT8, (5 * MIB,), bytes(5 * MIB)), done=True)] * 3
        with raw_server(address, StreamingEnv=Script(messages, speaks_first=True)):
            with playing([address], unroll_length=2) as game:
                nest, _ = game.rollout()
        assert nest[0][0][0].shape == (3, 1, 5 * MIB)

    def test_messages_above_256_mib_end_the_run_with_a_value_error(self, address: str) -> None:
        class Huge(Counting):
            def observation(self) -> Any:
                return np.zeros(257 * MIB, np.uint8)

        with serving(Huge, address):
            error = _failure(address)
        assert isinstance(error, (ValueError, RuntimeError)) and "large" in str(error).lower()


def test_a_server_with_all_the_streams_it_may_have_refuses_another(address: str) -> None:
    with serving(Vector, address, max_streams=2):
        with RawStream(address, "StreamingVectorEnv") as first:
            first.send(wire.vector_action(seed=1))
            first.read()
            with RawStream(address, "StreamingVectorEnv") as second:
                second.send(wire.vector_action(seed=2))
                second.read()
                with RawStream(address, "StreamingVectorEnv") as third:
                    third.send(wire.vector_action(seed=3))
                    code, details = third.end()
                second.half_close()
                assert second.end()[0] is grpc.StatusCode.OK
            with RawStream(address, "StreamingVectorEnv") as another:
                another.send(wire.vector_action(seed=4))
                another.read()
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "has 2 open streams, which is its limit" in details


def test_calls_that_never_send_their_request_cannot_use_up_a_server(address: str) -> None:
    with serving(Vector, address, max_streams=1), contextlib.ExitStack() as silent:
        for _ in range(60):
            silent.enter_context(RawStream(address, "Describe"))
        codes = _refused(address)
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        silent.close()
        with playing([address]) as game:
            game.rollout()


def test_silent_health_checks_leave_all_other_calls_served(address: str) -> None:
    unasked: queue.Queue[bytes | None] = queue.Queue()
    with (
        serving(Vector, address, max_streams=1),
        grpc.insecure_channel(address) as strangers,
        grpc.insecure_channel(address) as channel,
    ):
        check = strangers.stream_stream("/grpc.health.v1.Health/Check")
        silent = [check(iter(unasked.get, None), timeout=SOON) for _ in range(70)]
        wait_for(lambda: any(call.done() for call in silent))
        refused = {call.code() for call in silent if call.done()}
        assert refused == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert describe(address, SOON)["num_envs"] == Vector.num_envs
        channel.unary_unary("/rpcenv.RPCServerStatus/GetStatus")(b"", timeout=SOON)
        with playing([address]) as game:
            game.rollout()
        for _ in silent:
            unasked.put(None)


def test_a_client_that_reads_no_refusals_keeps_the_server_from_nobody_else(tmp_path: Path) -> None:
    """The refusals fill the connection, so gRPC can end no further call of it."""
    path = str(tmp_path / "socket")
    with (
        serving(Vector, f"unix:{path}"),
        contextlib.closing(unread_calls(path, "/unknown.Service/Method", 6000)),
    ):
        assert describe(f"unix:{path}", SOON)["num_envs"] == Vector.num_envs


def test_calls_without_the_token_take_no_place_of_those_that_have_it(tmp_path: Path) -> None:
    path, token = str(tmp_path / "socket"), Credentials(token="a-token-of-this-test")
    with (
        serving(Vector, f"unix:{path}", credentials=token),
        contextlib.closing(unread_calls(path, "/rpcenv.RPCEnvServer/Describe", 6000)),
    ):
        assert describe(f"unix:{path}", SOON, token)["num_envs"] == Vector.num_envs


@pytest.mark.long
@pytest.mark.parametrize(
    ("service", "method"),
    [("grpc.health.v1.Health", "Check"), (SERVICE, "StreamingVectorEnv"), (SERVICE, "Describe")],
)
def test_a_call_whose_client_does_not_speak_is_ended_after_ten_seconds(
    service: str, method: str, address: str
) -> None:
    with serving(Vector, address), RawStream(address, method, service) as silent:
        began = time.monotonic()
        silent.end()
        assert 8 < time.monotonic() - began < 16


def _refused(address: str) -> set[grpc.StatusCode]:
    """Returns how a call ends while there is no room for it."""
    with RawStream(address, "Describe") as stream:
        return {stream.end()[0]}


@pytest.mark.parametrize(("attack", "protection"), CASES)
def test_strangers_do_not_harm_the_streams_of_a_learner(
    attack: str, protection: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    address = f"127.0.0.1:{free_port()}"
    own, learners = map(credentials_of, Keys(tmp_path).ends(protection))
    with (
        serving(Vector, address, credentials=own),
        playing([address] * 2, credentials=learners) as game,
    ):
        check_unharmed(game, address, attack, protection != "token", pytestconfig)


def test_messages_that_expand_are_refused_before_they_do(tmp_path: Path) -> None:
    """gRPC expands a message before it compares its size with the limit."""
    with served_elsewhere(tmp_path / "socket") as server:
        before = peak_bytes(server)
        with grpc.insecure_channel(f"unix:{tmp_path / 'socket'}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            with pytest.raises(grpc.RpcError) as refused:
                check(bytes(64 * MIB), timeout=SOON, compression=grpc.Compression.Gzip)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert peak_bytes(server) - before < 16 * MIB


def test_a_server_that_compresses_is_refused(address: str) -> None:
    options = wire.chunk(10, b"{}" + bytes([ord(" ")]) * MIB)  # which it compresses
    described = wire.description(wire.leaf(UINT8, (2, 2))) + options
    with raw_server(address, Describe=described):
        assert describe(address, SOON)["num_envs"] == 1
    with raw_server(address, compression=grpc.Compression.Gzip, Describe=described):
        with pytest.raises(ValueError, match="Method not found"):  # asked as an original server
            describe(address, SOON)


def test_messages_with_millions_of_fields_are_refused_before_they_are_parsed(
    tmp_path: Path,
) -> None:
    """An empty entry takes two bytes, and an object of a hundred."""
    with served_elsewhere(tmp_path / "socket") as server:
        before = peak_bytes(server)
        with RawStream(f"unix:{tmp_path / 'socket'}", "StreamingVectorEnv") as stream:
            stream.send(wire.vector_action(seed=1))
            stream.read()
            stream.send(wire.chunk(2, wire.chunk(2, b"") * (8 * MIB)))
            assert stream.end()[0] is grpc.StatusCode.OK, "what is no message ends a stream"
        assert peak_bytes(server) - before < 96 * MIB


def test_strangers_cannot_keep_calls_open_that_ask_for_the_health(address: str) -> None:
    with serving(Vector, address), grpc.insecure_channel(address) as channel:
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")
        with pytest.raises(grpc.RpcError) as refused:
            next(watch(b"", timeout=SOON))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def peak_bytes(process: subprocess.Popen[bytes]) -> int:
    """Returns the most memory that the process has had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.long
def test_a_tls_handshake_that_is_not_completed_is_cut_off_after_ten_seconds(tmp_path: Path) -> None:
    """However often its peer lets the server hear something."""
    keys = Keys(tmp_path)
    files = SecurityConfig(tls_cert=keys.cert, tls_key=keys.key, token_file=keys.token)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    tls = credentials_of(files)
    with serving(Vector, f"{address[0]}:{address[1]}", credentials=tls):
        began = time.monotonic()
        silent, halfway, slow = (socket.create_connection(address) for _ in range(3))
        halfway.sendall(hello()[:100])
        rest = list(hello()[:-1])
        open_for: dict[socket.socket, float] = {}
        while len(open_for) < 3:
            waiting = [peer for peer in (silent, halfway, slow) if peer not in open_for]
            for peer in select.select(waiting, [], [], 0.25)[0]:
                assert is_closed(peer), "the server says nothing before the client does"
                open_for[peer] = time.monotonic() - began
            assert time.monotonic() - began < SOON
            if slow not in open_for:
                with contextlib.suppress(OSError):
                    slow.sendall(bytes([rest.pop(0)]))
    for peer in open_for:
        peer.close()
    assert all(8 < seconds < 16 for seconds in open_for.values()), open_for.values()


def hello() -> bytes:
    """Returns what a client sends first."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="a")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def is_closed(peer: socket.socket) -> bool:
    """Returns whether what has come from the other side is its end."""
    try:
        return peer.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("limit", [0, -1, 65_537])
def test_a_limit_that_makes_no_sense_is_a_value_error(limit: int) -> None:
    with pytest.raises(ValueError, match=f"between 1 and 65536, got {limit}"):
        Server(Vector, "unix:/tmp/unused", max_streams=limit)
