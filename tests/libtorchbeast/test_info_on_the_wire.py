# SPDX-License-Identifier: Apache-2.0
"""Numbers of games travel from servers to rollouts, between peers of any version."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import wire
from background import SOON
from peers import RawStream, Script, ask, raw_server
from served_envs import EPISODE_LENGTH, Counting, Telling, Vector
from serving import playing, serving
from wire import BOOL, FLOAT32, INT32

from libtorchbeast import Server, describe

KEYWORDS = ["env", "nothing"]
NUM_ENVS = Telling.num_envs
TOLD: dict[str, Any] = {
    "env_id": "Telling",
    "num_envs": NUM_ENVS,
    "num_streams": 1,
    "frame_stack": 1,
    "observation": ("int32", (1,)),
    "action_space": {"type": "Discrete", "n": 4, "start": 1},
    "info_keywords": KEYWORDS,
}
UNTOLD = TOLD | {"info_keywords": []}
ACTION = wire.vector_action(wire.leaf(wire.INT64, (NUM_ENVS,), bytes(8 * NUM_ENVS)))


def test_numbers_stand_in_the_rows_in_which_games_end(address: str) -> None:
    rows = 0
    with serving(Telling, address, description=TOLD), playing([address], unroll_length=4) as game:
        for nest, beside in game.rollouts(5):
            returns, info = nest[0][0][4], beside["info"]
            assert sorted(info) == sorted(KEYWORDS)
            ended = beside["episode_end"].numpy()
            expected = np.where(ended, np.arange(NUM_ENVS, dtype=np.float32), np.nan)
            np.testing.assert_array_equal(info["env"].numpy(), expected)
            assert info["nothing"].dtype == returns.dtype and info["nothing"].isnan().all()
            assert set(returns[beside["episode_end"]].tolist()) == {2.0 * EPISODE_LENGTH}
            rows += int(ended.sum())
    assert rows > 15


def test_keywords_are_described(address: str) -> None:
    with serving(Telling, address, description=TOLD):
        assert describe(address, SOON)["info_keywords"] == KEYWORDS
    with serving(Counting, address):
        assert describe(address, SOON)["info_keywords"] == []


# --- peers of earlier versions, which know neither field


def test_a_learner_of_an_earlier_version_sees_what_it_always_saw(address: str) -> None:
    """Unknown fields of a message are skipped, so all others must stay as they were."""
    untold = _described_and_played(address, Vector, UNTOLD)
    told = _described_and_played(address, Telling, TOLD)
    keywords = wire.chunk(12, b"env") + wire.chunk(12, b"nothing")
    numbers = [struct.pack("<2f", e, np.nan) for e in range(NUM_ENVS)]
    info = wire.chunk(9, wire.array(FLOAT32, (NUM_ENVS, 2), b"".join(numbers)))
    assert told[0] == untold[0] + keywords
    ends = [step == before + info for step, before in zip(told[1:], untold[1:], strict=True)]
    others = [step == before for step, before in zip(told[1:], untold[1:], strict=True)]
    assert ends == [False, False, False, True, False, False, True]
    assert others == [not end for end in ends]


def _described_and_played(address: str, env_class: Any, description: dict[str, Any]) -> list[bytes]:
    """Returns a server's description and its first seven steps, as bytes."""
    with serving(env_class, address, description=description):
        messages = [ask(address, "Describe")]
        with RawStream(address, "StreamingVectorEnv") as stream:
            for request in [wire.vector_action(seed=1)] + [ACTION] * 6:
                stream.send(request)
                messages.append(stream.read())
    return messages


def test_a_server_of_an_earlier_version_has_no_info(address: str) -> None:
    ended = wire.array(BOOL, (2,), b"\1\1")
    step = wire.vector_step(2, observation=wire.leaf(INT32, (2, 1), bytes(8)), episode_end=ended)
    answer = wire.description(wire.leaf(INT32, (1,)), num_envs=2)
    script = Script([step] * 9, speaks_first=False)
    with raw_server(address, Describe=answer, StreamingVectorEnv=script):
        assert describe(address, SOON)["info_keywords"] == []
        with playing([address]) as game:
            _, beside = game.rollout()
    assert "info" not in beside and beside["episode_end"].any()


def test_a_server_of_the_original_has_no_info(address: str) -> None:
    step = wire.step(wire.leaf(wire.UINT8, (2,), bytes(2)), done=True)
    with raw_server(address, StreamingEnv=Script([step] * 9, speaks_first=True)):
        assert describe(address, SOON)["info_keywords"] == []
        with playing([address]) as game:
            assert "info" not in game.rollout()[1]


# --- environments that do not give what their server has described


def _telling(told: Any) -> type[Telling]:
    return type("Odd", (Telling,), {"told": lambda self: told})


@pytest.mark.parametrize(
    ("told", "got"),
    [
        (None, "None, but 3 games ended"),
        (np.zeros((3, 2)), r"float64\[3, 2\]"),
        (np.zeros((2, 2), np.float32), r"float32\[2, 2\]"),
        (np.zeros((3, 1), np.float32), r"float32\[3, 1\]"),
        (np.zeros(6, np.float32), r"float32\[6\]"),
    ],
)
def test_an_info_of_another_form_is_a_failure_of_the_environment(
    told: Any, got: str, address: str
) -> None:
    with serving(_telling(told), address, description=TOLD):
        with pytest.raises(RuntimeError, match=rf"info must be float32\[3, 2\], got {got}"):
            with playing([address]) as game:
                game.rollout()


def test_a_step_without_the_seventh_value_is_a_failure_of_the_environment(address: str) -> None:
    sentence = r"step\(\) must return .*final_observation\[, resets\], info\), got 6 values"
    with serving(Vector, address, description=TOLD):
        with pytest.raises(RuntimeError, match=sentence), playing([address]) as game:
            game.rollout()


def test_a_single_environment_cannot_have_keywords(address: str) -> None:
    described = TOLD | {"num_envs": 1, "observation": ("uint8", (2, 2))}
    with serving(Counting, address, description=described):
        with pytest.raises(RuntimeError, match="info_keywords need an environment with num_envs"):
            with playing([address]) as game:
                game.rollout()


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        (
            [str(k) for k in range(257)],
            "the number of info keywords must lie between 0 and 256, got 257",
        ),
        (["x" * 257], "an info keyword has 257 bytes, expected 1 to 256"),
        (["x", "a\tb"], "an info keyword has a comma or a control character"),
        (["x", "y", "x"], "the info keyword x comes twice, expected once"),
    ],
)
def test_a_server_with_keywords_that_no_learner_takes_cannot_be_made(
    keywords: list[str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        Server(Telling, "unix:/tmp/unused", description=TOLD | {"info_keywords": keywords})
