# SPDX-License-Identifier: Apache-2.0
"""describe(): the description of a server that a learner makes its network from."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import served_envs
import wire
from background import SOON
from peers import Script, raw_server
from served_envs import Counting, Legacy, Vector
from serving import playing, serving

from libtorchbeast import describe

OBSERVATION = wire.leaf(wire.UINT8, (2, 2))


def test_a_single_environment_is_described(address: str) -> None:
    with serving(Counting, address, env_id="Counting-v0", num_streams=2):
        assert describe(address, SOON) == {
            "protocol_version": 1,
            "env_id": "Counting-v0",
            "num_envs": 1,
            "num_streams": 2,
            "num_servers": 0,
            "frame_stack": 1,
            "observation": ("uint8", (2, 2)),
            "action_space": {"type": "Discrete", "n": 4, "start": 1},
            "observation_space": None,
            "options": None,
            "info_keywords": [],
        }


def test_a_vector_environment_is_described_by_one_of_its_environments(address: str) -> None:
    class Stacking(Vector):
        frame_stack = 4

    with serving(Stacking, address):
        description = describe(address, SOON)
    assert description["num_envs"] == 3 and description["frame_stack"] == 4
    assert description["observation"] == ("int32", (1,))


def test_nested_observations_are_described_as_nests(address: str) -> None:
    env = served_envs.with_observations({"b": (np.zeros(2), 3), "a": np.zeros((1, 2), np.uint8)})
    with serving(env, address):
        described = describe(address, SOON)["observation"]
    assert described == {"a": ("uint8", (1, 2)), "b": (("float64", (2,)), ("int64", ()))}


def test_an_action_space_that_cannot_be_described_is_none(address: str) -> None:
    with serving(Legacy, address):
        assert describe(address, SOON)["action_space"] is None


def test_a_given_description_is_sent_without_making_an_environment(address: str) -> None:
    given = {
        "env_id": "Given",
        "num_envs": 5,
        "num_streams": 2,
        "num_servers": 7,
        "frame_stack": 3,
        "observation": {"x": ("float32", (3,)), "y": [("bool", ())]},
        "action_space": {"type": "Box", "low": [-1.0], "high": ["inf"], "shape": [1]},
        "observation_space": {
            "type": "Dict",
            "spaces": {
                "x": {"type": "Array", "low": "-inf", "high": 1.0},
                "y": {"type": "Tuple", "spaces": [{"type": "Array", "categories": [2]}]},
            },
        },
        "options": {"frame_skip": 4, "sticky_actions": None},
        "info_keywords": ["score", "r\u00e9sultat"],
    }

    def make() -> None:
        raise AssertionError("an environment was made")

    with serving(make, address, description=given):
        described = describe(address, SOON)
    assert described.pop("protocol_version") == 1
    assert described == given | {"observation": {"x": ("float32", (3,)), "y": (("bool", ()),)}}


def test_describing_twice_makes_one_environment(address: str) -> None:
    made = []

    def make() -> Counting:
        made.append(1)
        return Counting()

    with serving(make, address):
        assert describe(address, SOON) == describe(address, SOON)
    assert made == [1]


def test_an_environment_that_cannot_be_made_is_reported_with_its_traceback(address: str) -> None:
    def make() -> None:
        raise OSError("no ROM in the slot")

    with serving(make, address):
        with pytest.raises(RuntimeError, match=f"(?s){address}.*OSError: no ROM in the slot"):
            describe(address, SOON)


def test_an_original_server_is_described_from_its_first_step(address: str) -> None:
    first = wire.step(wire.leaf(wire.UINT8, (2, 3), bytes(6)), done=True)
    script = Script([first], speaks_first=True)
    with raw_server(address, StreamingEnv=script):
        assert describe(address, SOON) == {
            "protocol_version": 0,
            "env_id": "",
            "num_envs": 1,
            "num_streams": 1,
            "num_servers": 0,
            "frame_stack": 1,
            "observation": ("uint8", (2, 3)),
            "action_space": None,
            "observation_space": None,
            "options": None,
            "info_keywords": [],
        }
        assert script.half_closed.wait(SOON) and script.received == []


def test_describing_an_absent_server_is_a_timeout_error(address: str) -> None:
    with pytest.raises(TimeoutError, match=f"no environment server answers at {address}"):
        describe(address, 0.1)


@pytest.fixture
def deaf(runtime_folder: Path) -> Iterator[str]:
    """Returns the address of a socket that accepts connections and never answers."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(runtime_folder / "deaf"))
        listener.listen()
        yield f"unix:{runtime_folder}/deaf"


def test_a_socket_where_nobody_speaks_grpc_is_a_timeout_error(deaf: str) -> None:
    with pytest.raises(TimeoutError, match=deaf):
        describe(deaf, 0.3)


def test_a_server_that_never_answers_is_a_timeout_error(address: str) -> None:
    def never(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        given_up = threading.Event()
        context.add_callback(given_up.set)
        given_up.wait(SOON)
        yield b""

    with raw_server(address, Describe=never):
        with pytest.raises(TimeoutError, match=address):
            describe(address, 0.3)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (wire.description(OBSERVATION, version=2), "protocol version 2, expected 1"),
        (b"", "protocol version 0, expected 1"),
        (wire.description(OBSERVATION, num_envs=0), "environments .* between 1 and .* got 0"),
        (wire.description(OBSERVATION, num_envs=-1), "environments .* got -1"),
        (wire.description(OBSERVATION, num_envs=2**31 - 1), "environments .* got 2147483647"),
        (wire.description(OBSERVATION, num_streams=-5), "streams .* got -5"),
        (wire.description(OBSERVATION, stack=10**6), "stack .* got 1000000"),
        (wire.description(OBSERVATION) + wire.number(9, -1), "servers .* between 0 and .* got -1"),
        (wire.description(OBSERVATION) + wire.number(9, 10**6), "servers .* got 1000000"),
        (wire.description(b""), "none of them"),
        (wire.description(wire.leaf(17, (2,))), "dtype number 17"),
        (wire.description(wire.leaf(wire.UINT8, (-1,))), "dimension -1"),
        (wire.description(wire.leaf(wire.UINT8, [2**40])), "larger than a message"),
        (wire.description(wire.leaf(wire.UINT8, [2**20] * 3)), "larger than a message"),
        (wire.description(wire.leaf(wire.UINT8, [1] * 33)), "33 dimensions"),
    ],
)
def test_an_invalid_answer_is_a_value_error(answer: bytes, text: str, address: str) -> None:
    with raw_server(address, Describe=answer):
        with pytest.raises(ValueError, match=f"{address}.*{text}"):
            describe(address, SOON)


def test_unknown_ranges_of_values_are_not_sent(address: str) -> None:
    given = {
        "env_id": "",
        "num_envs": 1,
        "num_streams": 1,
        "frame_stack": 1,
        "observation": ("uint8", (2, 2)),
        "action_space": None,
    }
    with serving(Counting, address, description=given):
        assert describe(address, SOON)["observation_space"] is None


@pytest.mark.parametrize("place", [7, 8], ids=["action space", "observation space"])
@pytest.mark.parametrize(
    "text", [b"{not json", b"\xff\xfe", b"[" * 100_000], ids=["cut", "bytes", "deep"]
)
def test_a_space_that_raises_is_an_error_and_no_crash(
    place: int, text: bytes, address: str
) -> None:
    answer = wire.description(OBSERVATION) + wire.chunk(place, text)
    with raw_server(address, Describe=answer):
        with pytest.raises(ValueError, match=address):
            describe(address, SOON)


def test_an_answer_that_is_no_json_is_quoted_though_the_quote_cuts_a_character(
    address: str,
) -> None:
    answer = wire.description(OBSERVATION) + wire.chunk(7, b"x" + "é".encode() * 60)
    with raw_server(address, Describe=answer):
        with pytest.raises(ValueError) as failure:
            describe(address, SOON)
    assert str(failure.value) == f"{address}: expected JSON, got x{'é' * 39}?"


@pytest.mark.parametrize(
    "description",
    [
        {},
        {"env_id": "x"},
        dict.fromkeys(
            ["env_id", "num_envs", "num_streams", "frame_stack", "observation", "action_space"]
        ),
    ],
    ids=["empty", "incomplete", "of None"],
)
def test_a_server_refuses_a_description_that_lacks_something(
    description: dict[str, Any], address: str
) -> None:
    with pytest.raises((KeyError, TypeError, ValueError, RuntimeError)):
        with serving(Counting, address, description=description):
            pass


def test_a_description_with_an_unknown_dtype_is_refused(address: str) -> None:
    given = {
        "env_id": "",
        "num_envs": 1,
        "num_streams": 1,
        "frame_stack": 1,
        "observation": ("complex64", (1,)),
        "action_space": None,
    }
    with pytest.raises(ValueError, match="complex64"):
        with serving(Counting, address, description=given):
            pass


def test_a_description_has_the_number_of_servers_started_together(address: str) -> None:
    with raw_server(address, Describe=wire.description(OBSERVATION) + wire.number(9, 10)):
        assert describe(address, SOON)["num_servers"] == 10


def test_describing_does_not_disturb_a_stream(address: str) -> None:
    with serving(Counting, address), playing([address]) as game:
        game.rollout()
        describe(address, SOON)
        game.rollouts(3)


def test_what_a_terminal_would_obey_is_replaced(address: str) -> None:
    with serving(Counting, address, env_id="a\x1b[2Jb\u009bc"):
        assert describe(address, SOON)["env_id"] == "a?[2Jb?c"
