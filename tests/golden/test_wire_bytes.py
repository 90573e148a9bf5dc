# SPDX-License-Identifier: Apache-2.0
"""The original protocol's messages, written out byte by byte.

Servers and learners of the original TorchBeast interoperate with ours only as long as these bytes
stay as they are. They were not recorded from any program: each follows from proto/rpcenv.proto and
the encoding rules of protobuf,

* a field begins with a tag, number * 8 + wire type, where wire type 0 is a varint, 2 a length
  followed by that many bytes, and 5 four bytes, lowest first;
* a varint below 128 is one byte;
* fields that are zero or empty are not sent; the others come in the order of their numbers.

The other side of each test is plain grpcio, which passes bytes on as they are.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire
from background import SOON, wait_for
from peers import RawStream, Script, raw_server
from serving import playing, serving

import libtorchbeast
from libtorchbeast import describe


def hex_bytes(text: str) -> bytes:
    """Returns bytes from lines of hexadecimal numbers with comments after a #."""
    return bytes.fromhex(" ".join(line.split("#")[0] for line in text.splitlines()))


# A uint8 image [2, 3] of zeros, as ArrayNest.
IMAGE = hex_bytes(
    """
    0a 0e                     # ArrayNest.array (1, length): 14 bytes
      08 02                   #   NDArray.dtype (1, varint): 2, uint8
      12 02 02 03             #   NDArray.shape (2, packed, 2 bytes): 2, 3
      1a 06 00 00 00 00 00 00 #   NDArray.data (3, length): 6 bytes
    """
)

# The first message of a stream: reward 0, done, episode_step 0, episode_return 0.
FIRST_STEP = hex_bytes(
    """
    0a 10                        # Step.observation (1, length): 16 bytes
      0a 0e 08 02 12 02 02 03    #   the image
      1a 06 00 00 00 00 00 00
    18 01                        # Step.done (3, varint): true
    """
)

# After an action: the image is all ones now, reward 1.5 (0x3fc00000), not done, step 1, return 1.5.
SECOND_STEP = hex_bytes(
    """
    0a 10
      0a 0e 08 02 12 02 02 03
      1a 06 01 01 01 01 01 01
    15 00 00 c0 3f               # Step.reward (2, four bytes): 1.5
    20 01                        # Step.episode_step (4, varint): 1
    2d 00 00 c0 3f               # Step.episode_return (5, four bytes): 1.5
    """
)

# The episode is over: its counters are final, the image is the next episode's first.
LAST_STEP = hex_bytes(
    """
    0a 10
      0a 0e 08 02 12 02 02 03
      1a 06 00 00 00 00 00 00
    15 00 00 c0 3f
    18 01
    20 02
    2d 00 00 40 40               # 3.0
    """
)

# The discrete action 2: int64 without a dimension.
ACTION = hex_bytes(
    """
    12 0e                            # Action.nest_action (2, length): 14 bytes
      0a 0c                          #   ArrayNest.array: 12 bytes
        08 07                        #     dtype 7, int64; shape [] is not sent
        1a 08 02 00 00 00 00 00 00 00
    """
)

# The same with dimensions of time and batch, which no original learner sends: shape [1, 1].
PREFIXED_ACTION = hex_bytes("12 12  0a 10  08 07  12 02 01 01  1a 08 02 00 00 00 00 00 00 00")

# {"a": (5, ([0.5],))}: int8 without a dimension, and in a vector of one entry float32 [1].
NESTED_ACTION = hex_bytes(
    """
    12 21                                  # Action.nest_action (2, length): 33 bytes
      1a 1f                                #   ArrayNest.map (3, length), an entry: 31 bytes
        0a 01 61                           #     key (1, length): "a"
        12 1a                              #     value (2, length), an ArrayNest: 26 bytes
          12 07                            #       ArrayNest.vector (2, length): 7 bytes
            0a 05 08 01 1a 01 05           #         ArrayNest.array: int8 [], 5
          12 0f                            #       its second entry: 15 bytes
            12 0d                          #         a vector again: 13 bytes
              0a 0b 08 0b 12 01 01 1a 04   #           float32 [1]
              00 00 00 3f                  #           0.5
    """
)

# NDArrays of shape [1] that hold 1 (dtype 0 is not sent).
DTYPES = {
    "bool": hex_bytes("12 01 01 1a 01 01"),
    "int8": hex_bytes("08 01 12 01 01 1a 01 01"),
    "uint8": hex_bytes("08 02 12 01 01 1a 01 01"),
    "int16": hex_bytes("08 03 12 01 01 1a 02 01 00"),
    "uint16": hex_bytes("08 04 12 01 01 1a 02 01 00"),
    "int32": hex_bytes("08 05 12 01 01 1a 04 01 00 00 00"),
    "uint32": hex_bytes("08 06 12 01 01 1a 04 01 00 00 00"),
    "int64": hex_bytes("08 07 12 01 01 1a 08 01 00 00 00 00 00 00 00"),
    "uint64": hex_bytes("08 08 12 01 01 1a 08 01 00 00 00 00 00 00 00"),
    "float32": hex_bytes("08 0b 12 01 01 1a 04 00 00 80 3f"),
    "float64": hex_bytes("08 0c 12 01 01 1a 08 00 00 00 00 00 00 f0 3f"),
    "float16": hex_bytes("08 17 12 01 01 1a 02 00 3c"),
}


class Box:
    """The attributes of a space of arrays that a server reads."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


class Spaces:
    """The attributes of a nested space that a server reads."""

    def __init__(self, spaces: Any) -> None:
        self.spaces = spaces


class Image:
    """An environment of old Gym; episodes of two steps with reward 1.5, as in the messages."""

    received: list[Any]

    def __init__(self) -> None:
        self.time = 0

    def reset(self) -> np.ndarray:
        self.time = 0
        return np.zeros((2, 3), np.uint8)

    def step(self, action: Any) -> tuple[Any, ...]:
        type(self).received.append(action)
        self.time += 1
        return np.ones((2, 3), np.uint8), 1.5, self.time == 2, {}


@pytest.fixture
def address(runtime_folder: Path) -> str:
    Image.received = []
    return f"unix:{runtime_folder}/env"


def nest_of(array: bytes) -> bytes:
    """Returns a short NDArray as ArrayNest."""
    return bytes([0x0A, len(array)]) + array


def step_of(array: bytes) -> bytes:
    """Returns the first step of a stream that observes a short NDArray."""
    nest = nest_of(array)
    return bytes([0x0A, len(nest)]) + nest + hex_bytes("18 01")


class TestOurServerSpeaksToAnOriginalLearner:
    def test_a_server_speaks_first_and_then_answers_each_action(self, address: str) -> None:
        with serving(Image, address), RawStream(address) as stream:
            assert stream.read() == FIRST_STEP
            for expected in (SECOND_STEP, LAST_STEP, SECOND_STEP, LAST_STEP):
                stream.send(ACTION)
                assert stream.read() == expected

    def test_it_ends_with_ok_when_the_learner_half_closes(self, address: str) -> None:
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            stream.half_close()
            code, details = stream.end()
        assert code.name == "OK" and details == ""

    def test_it_reads_a_discrete_action(self, address: str) -> None:
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            stream.send(ACTION)
            stream.read()
        [action] = Image.received
        assert action.dtype == np.int64 and action.shape == () and action == 2

    def test_the_unused_field_of_an_action_is_ignored(self, address: str) -> None:
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            stream.send(hex_bytes("08 03  # Action.action (1, varint): 3") + ACTION)
            assert stream.read() == SECOND_STEP
        assert Image.received[0] == 2

    def test_it_reads_a_nested_action(self, address: str) -> None:
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            stream.send(NESTED_ACTION)
            stream.read()
        [action] = Image.received
        number, [half] = action["a"]
        assert number.dtype == np.int8 and number.shape == () and number == 5
        assert half.dtype == np.float32 and half.tolist() == [0.5]

    @pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 2), (2, 1, 1)])
    def test_the_environment_gets_the_shape_that_was_sent(
        self, shape: tuple[int, ...], address: str
    ) -> None:
        value = np.arange(np.prod(shape, dtype=int), dtype=np.uint8).reshape(shape)
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            stream.send(wire.action(wire.leaf(wire.UINT8, shape, value.tobytes())))
            assert stream.read() == SECOND_STEP
        [action] = Image.received
        assert action.dtype == np.uint8 and action.shape == shape
        assert action.tolist() == value.tolist()

    def test_dimensions_of_time_and_batch_are_taken_off(self, address: str) -> None:
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            for _ in range(2):
                stream.send(PREFIXED_ACTION)
                stream.read()
        for action in Image.received:
            assert action.dtype == np.int64 and action.shape == () and action == 2

    @pytest.mark.parametrize(
        ("space", "sent", "expected"),
        [
            (Box((1, 1)), [(1, 1)], [(1, 1)]),
            (Box((1, 1)), [(1, 1, 1, 1)], [(1, 1)]),
            (Box((1, 1, 2)), [(1, 1, 2)], [(1, 1, 2)]),
            (Box((1, 1, 2)), [(1, 1, 1, 1, 2)], [(1, 1, 2)]),
            (Box((2,)), [(1, 1, 2)], [(2,)]),
            (Box((2,)), [(1, 1, 3)], [(1, 1, 3)]),  # neither: as an original server would
            (Spaces((Box((1, 1)), Box(()))), [(1, 1), ()], [(1, 1), ()]),
            (Spaces((Box((1, 1)), Box(()))), [(1, 1, 1, 1), (1, 1)], [(1, 1), ()]),
            ((Box((1, 1)), Box((1, 1))), [(1, 1), (1, 1)], [(1, 1), (1, 1)]),
        ],
    )
    def test_the_action_space_tells_whose_dimensions_they_are(
        self, space: Any, sent: list[tuple[int, ...]], expected: list[tuple[int, ...]], address: str
    ) -> None:
        class Env(Image):
            action_space = space

        leaves = [wire.leaf(wire.UINT8, shape, bytes(int(np.prod(shape)))) for shape in sent]
        with serving(Env, address), RawStream(address) as stream:
            stream.read()
            stream.send(wire.action(wire.vector(*leaves) if len(leaves) > 1 else leaves[0]))
            assert stream.read() == SECOND_STEP
        [action] = Image.received
        received = action if isinstance(action, tuple) else (action,)
        assert [leaf.shape for leaf in received] == expected

    def test_the_first_action_of_a_stream_decides_for_all(self, address: str) -> None:
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            for shape in [(2,), (1, 1)]:
                stream.send(wire.action(wire.leaf(wire.UINT8, shape, bytes(np.prod(shape)))))
                stream.read()
        assert [action.shape for action in Image.received] == [(2,), (1, 1)]

    def test_it_reads_sizes_that_are_not_packed(self, address: str) -> None:
        unpacked = hex_bytes(
            """
            12 0d
              0a 0b
                08 02
                10 01 10 03    # NDArray.shape (2, varint), twice
                1a 03 04 05 06
            """
        )
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            stream.send(unpacked)
            assert stream.read() == SECOND_STEP
        assert Image.received[0].tolist() == [[4, 5, 6]]

    def test_array_comes_before_vector_and_vector_before_map(self, address: str) -> None:
        array = hex_bytes("0a 05 08 01 1a 01 05")
        vector = b"\x12" + bytes([len(array)]) + array
        mapping = hex_bytes("1a 0c 0a 01 61 12 07") + array
        with serving(Image, address), RawStream(address) as stream:
            stream.read()
            for nest in (array + vector + mapping, vector + mapping, mapping):
                stream.send(b"\x12" + bytes([len(nest)]) + nest)
                stream.read()
        one, several, named = Image.received
        assert one == 5 and several == (5,) and named == {"a": 5}

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_it_sends_every_dtype(self, dtype: str, address: str) -> None:
        class Env(Image):
            def reset(self) -> np.ndarray:
                return np.ones(1, dtype)

        with serving(Env, address), RawStream(address) as stream:
            assert stream.read() == step_of(DTYPES[dtype])

    @pytest.mark.parametrize(
        ("observation", "nest"),
        [
            (np.uint8(7), hex_bytes("0a 05 08 02 1a 01 07")),  # no dimension: no shape
            (np.zeros((2, 0), np.uint8), hex_bytes("0a 06 08 02 12 02 02 00")),
            (np.zeros(300, bool), hex_bytes("0a b3 02 12 02 ac 02 1a ac 02" + "00" * 300)),
            ((np.uint8(7),), hex_bytes("12 07 0a 05 08 02 1a 01 07")),
            ({"k": np.uint8(7)}, hex_bytes("1a 0c 0a 01 6b 12 07 0a 05 08 02 1a 01 07")),
        ],
        ids=["scalar", "empty", "long", "vector", "map"],
    )
    def test_it_sends_every_kind_of_nest(self, observation: Any, nest: bytes, address: str) -> None:
        class Env(Image):
            def reset(self) -> Any:
                return observation

        with serving(Env, address), RawStream(address) as stream:
            assert stream.read() == wire.chunk(1, nest) + hex_bytes("18 01")

    def test_an_exception_ends_the_stream_with_internal_and_its_traceback(
        self, address: str
    ) -> None:
        class Env(Image):
            def step(self, action: Any) -> Any:
                raise KeyError("the joystick is gone")

        with serving(Env, address), RawStream(address) as stream:
            stream.read()
            stream.send(ACTION)
            code, details = stream.end()
        assert code.name == "INTERNAL"
        assert details.startswith("Traceback") and "KeyError: 'the joystick is gone'" in details


class TestOurLearnerPlaysAgainstAnOriginalServer:
    def test_it_sends_actions_and_reads_steps(self, address: str) -> None:
        def agent(inputs: Any) -> Any:
            return (np.full((1, 1), 2, np.int64),), ()

        many_games = [SECOND_STEP, LAST_STEP] * 1000  # no action is left without an answer
        script = Script([FIRST_STEP, *many_games], speaks_first=True)
        with raw_server(address, StreamingEnv=script):
            with playing([address], agent, unroll_length=3) as game:
                nest, info = game.rollout()
            assert script.half_closed.wait(SOON), "the learner ends by half-closing"
        assert len(script.received) >= 3 and set(script.received) == {ACTION}
        (observation, reward, done, episode_step, episode_return), _ = nest[0]
        assert observation.shape == (4, 1, 2, 3)
        assert observation[:, 0, 0, 0].tolist() == [0, 1, 0, 1]
        assert reward[:, 0].tolist() == [0, 1.5, 1.5, 1.5]
        assert done[:, 0].tolist() == [True, False, True, False]
        assert episode_step[:, 0].tolist() == [0, 1, 2, 1]
        assert episode_return[:, 0].tolist() == [0, 1.5, 3, 1.5]
        assert info["episode_end"][:, 0].tolist() == [False, False, True, False]
        assert not info["truncated"].any()

    def test_it_describes_the_server_by_its_first_step(self, address: str) -> None:
        with raw_server(address, StreamingEnv=Script([FIRST_STEP], speaks_first=True)):
            description = describe(address, SOON)
        assert description["observation"] == ("uint8", (2, 3))
        assert description["protocol_version"] == 0

    def test_it_sends_nested_actions(self, address: str) -> None:
        def agent(inputs: Any) -> Any:
            action = {"a": (np.full((1, 1), 5, np.int8), [np.full((1, 1, 1), 0.5, np.float32)])}
            return (action,), ()

        script = Script([FIRST_STEP, SECOND_STEP], speaks_first=True)
        with raw_server(address, StreamingEnv=script), playing([address], agent):
            wait_for(lambda: script.received)
        assert script.received[0] == NESTED_ACTION

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_it_reads_every_dtype(self, dtype: str, address: str) -> None:
        messages = [step_of(DTYPES[dtype])] * 2
        with raw_server(address, StreamingEnv=Script(messages, speaks_first=True)):
            with playing([address], unroll_length=1) as game:
                nest, _ = game.rollout()
        observation = nest[0][0][0]
        assert str(observation.dtype) == f"torch.{dtype}"
        assert observation.flatten().tolist() == [1, 1]

    def test_it_reads_counters_of_long_episodes(self, address: str) -> None:
        late = b"\x0a\x10" + IMAGE + hex_bytes("15 00 00 80 bf  20 ac 02  2d 00 00 96 c3")
        with raw_server(address, StreamingEnv=Script([FIRST_STEP, late], speaks_first=True)):
            with playing([address], unroll_length=1) as game:
                nest, _ = game.rollout()
        (_, reward, _, episode_step, episode_return), _ = nest[0]
        assert reward[1].item() == -1 and episode_step[1].item() == 300
        assert episode_return[1].item() == -300


def test_the_wire_helpers_write_the_golden_bytes() -> None:
    zeros, ones = bytes(6), b"\1" * 6
    assert wire.leaf(wire.UINT8, (2, 3), zeros) == IMAGE
    assert wire.step(IMAGE, done=True) == FIRST_STEP
    observation = wire.leaf(wire.UINT8, (2, 3), ones)
    assert wire.step(observation, 1.5, False, 1, 1.5) == SECOND_STEP
    assert wire.step(IMAGE, 1.5, True, 2, 3.0) == LAST_STEP
    assert wire.discrete_action(2) == ACTION
    number = wire.leaf(1, (), b"\x05")
    half = wire.leaf(wire.FLOAT32, (1,), hex_bytes("00 00 00 3f"))
    assert wire.action(wire.mapping(a=wire.vector(number, wire.vector(half)))) == NESTED_ACTION


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the module that protoc generates from rpcenv.proto."""
    protoc = pytest.importorskip("grpc_tools.protoc")
    folder = tmp_path_factory.mktemp("generated")
    assert protoc.main(["protoc", f"-I{PROTO.parent}", f"--python_out={folder}", str(PROTO)]) == 0
    spec = importlib.util.spec_from_file_location("rpcenv_pb2", folder / "rpcenv_pb2.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROTO = Path(libtorchbeast.__file__).with_name("proto") / "rpcenv.proto"


def test_the_generated_module_reads_and_writes_the_golden_bytes(messages: Any) -> None:
    array = messages.NDArray(dtype=2, shape=[2, 3], data=b"\1" * 6)
    step = messages.Step(
        observation=messages.ArrayNest(array=array), reward=1.5, episode_step=1, episode_return=1.5
    )
    assert step.SerializeToString() == SECOND_STEP
    assert messages.Step.FromString(LAST_STEP).done is True
    nested = messages.Action.FromString(NESTED_ACTION).nest_action.map["a"]
    assert nested.vector[0].array.data == b"\5"
    assert nested.vector[1].vector[0].array.shape == [1]
    discrete = messages.Action.FromString(ACTION).nest_action.array
    assert discrete.dtype == 7 and discrete.shape == [] and len(discrete.data) == 8
