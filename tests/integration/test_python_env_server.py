# SPDX-License-Identifier: Apache-2.0
"""The pure-Python example server: an ActorPool plays on it, and a whole learner trains from it."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import grpc
import pytest
import torch
import wire
from background import SOON
from peers import RawStream
from programs import Workshop
from serving import playing

import torchbeast
from libtorchbeast import describe
from torchbeast.reporting.log_files import read_logs

EXAMPLE = Path(torchbeast.__file__).parents[1] / "examples" / "python_env_server.py"
NUM_ENVS, STEPS = 4, 9


class Example:
    """The example server in a process."""

    def __init__(self, address: str, *args: str) -> None:
        pytest.importorskip("grpc_tools")
        self.address = address
        self._process = subprocess.Popen(
            [sys.executable, str(EXAMPLE), "--address", address, *args],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert "Serving" in self._process.stdout.readline(), self._process.communicate()[1]

    def stop(self) -> tuple[int, str]:
        """Returns the exit code and the output on stderr."""
        self._process.send_signal(signal.SIGTERM)
        _, said = self._process.communicate(timeout=SOON)
        return self._process.returncode, said


@pytest.fixture(scope="module")
def example() -> Iterator[Example]:
    with tempfile.TemporaryDirectory(prefix="tb") as folder:  # short enough for a socket
        started = Example(f"unix:{folder}/catch.0", "--num_envs", str(NUM_ENVS))
        yield started
        code, said = started.stop()
    assert code == 0 and said == ""


def follow_the_ball(inputs: Any) -> Any:
    """The best policy: moves the paddle under the ball."""
    (board, *_), _ = inputs  # [1, B, 10, 5]
    paddle = board[..., -1, :].argmax(-1)
    ball = board[..., :-1, :].sum(-2).argmax(-1)
    return (1 + (ball > paddle).long() - (ball < paddle).long(),), ()


def check_episodes(env_outputs: Any) -> None:
    """Asserts that every row is one of a game of nine steps."""
    board, reward, done, episode_step, episode_return = env_outputs
    rows = torch.arange(done.shape[0])
    assert torch.equal(done, (rows % STEPS == 0)[:, None].expand_as(done))
    last = (rows % STEPS == 0) & (rows > 0)
    assert (reward[last] == 1).all() and (reward[~last] == 0).all()
    assert torch.equal(episode_return, reward)
    expected = torch.where(last, STEPS, rows % STEPS)
    assert torch.equal(episode_step, expected[:, None].expand_as(episode_step).int())
    row_of_ball = board[..., :-1, :].argmax(-2).amax(-1)
    assert torch.equal(row_of_ball, (rows % STEPS)[:, None].expand_as(row_of_ball))


def test_the_example_server_describes_itself(example: Example) -> None:
    assert describe(example.address, SOON) == {
        "protocol_version": 1,
        "env_id": "Catch",
        "num_envs": NUM_ENVS,
        "num_streams": 1,
        "num_servers": 0,
        "frame_stack": 1,
        "observation": ("float32", (10, 5)),
        "action_space": {"type": "Discrete", "n": 3, "start": 0},
        "observation_space": None,
        "options": None,
        "info_keywords": [],
    }


@pytest.mark.long
def test_a_pool_plays_the_best_policy_on_the_example_server(example: Example) -> None:
    with playing([example.address] * 2, follow_the_ball, unroll_length=4 * STEPS) as game:
        rollouts = game.rollouts(4)
    first = [nest for nest, info in rollouts if info["rollout"][0, 0] == 0]
    assert first
    for nest in first:
        assert nest[0][0][0].shape == (4 * STEPS + 1, NUM_ENVS, 10, 5)
        check_episodes(nest[0][0])


def test_two_streams_play_different_games(example: Example) -> None:
    with playing([example.address] * 2, follow_the_ball, unroll_length=8 * STEPS) as game:
        boards = {}
        while len(boards) < 2:
            nest, info = game.rollout()
            boards.setdefault(int(info["stream"][0, 0]), nest[0][0][0])
    one, other = boards.values()
    assert not torch.equal(one, other)


@pytest.mark.parametrize("shape", [(), (1, 1)], ids=["bare", "with time and batch"])
def test_learners_of_the_original_play_on_the_example_server(
    shape: tuple[int, ...], example: Example
) -> None:
    with RawStream(example.address) as stream:
        dones = []
        for _ in range(2 * STEPS + 1):
            dones.append(b"\x18\x01" in stream.read())  # Step.done = true
            stream.send(wire.action(wire.leaf(wire.INT64, shape, b"\1" + bytes(7))))
        assert [i for i, done in enumerate(dones) if done] == [0, STEPS, 2 * STEPS]
        stream.read()
        stream.half_close()
        assert stream.end()[0] is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "nest",
    [
        b"",
        wire.leaf(wire.FLOAT32, (), bytes(4)),
        wire.leaf(wire.INT64, (), b"\7" + bytes(7)),
        wire.leaf(wire.INT64, (1,), bytes(8)),
    ],
    ids=["nothing", "float", "no such action", "no such shape"],
)
def test_the_example_server_refuses_invalid_actions(nest: bytes, example: Example) -> None:
    with RawStream(example.address) as stream:
        stream.read()
        stream.send(wire.action(nest))
        code, details = stream.end()
    assert code is grpc.StatusCode.INVALID_ARGUMENT and "expected" in details


@pytest.mark.long
def test_a_learner_trains_from_the_example_server(example: Example, workshop: Workshop) -> None:
    basename = example.address.removesuffix(".0")
    code, said = workshop.run(
        "polybeast_learner",
        *("--pipes_basename", basename, "--num_envs", str(NUM_ENVS), "--xpid", "python"),
        *("--batch_size", "4", "--unroll_length", "18", "--total_steps", "24000"),
        *("--learning_rate", "0.003", "--entropy_cost", "0.01", "--torch_threads", "1"),
        *("--model", "mlp", "--seed", "1", "--normalise_returns", "false"),
        timeout=200.0,
    )
    assert code == 0, said
    rows = read_logs(workshop.run_folder("python"))
    returns = [float(row["mean_episode_return"]) for row in rows if "mean_episode_return" in row]
    returns = [value for value in returns if not math.isnan(value)]
    early, late = returns[: len(returns) // 10], returns[-len(returns) // 10 :]
    assert fmean(early) < 0 < 0.5 < fmean(late), (early, late)


def test_the_example_server_imports_nothing_of_torchbeast() -> None:
    imports = re.findall(r"^\s*(?:import|from) (\w+)", EXAMPLE.read_text(), re.MULTILINE)
    assert "grpc" in imports and not {"libtorchbeast", "torchbeast", "torch", "nest"} & set(imports)
