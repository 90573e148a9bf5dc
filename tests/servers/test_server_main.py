# SPDX-License-Identifier: Apache-2.0
"""Steps of served environments tell the numbers of the games that ended in them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.tasks import tasks_in
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import UsageError
from torchbeast.servers import server_main
from torchbeast.servers.server_main import ServedEnv, ServerActivity


def _stepped(ended: list[bool], final_info: dict[int, Any]) -> Any:
    """Returns what a learner is told of a step in which these games ended."""
    flags = np.array(ended)
    step = VecStep(None, np.zeros(3, np.float32), flags, ~flags, flags, None)
    env = SimpleNamespace(num_envs=3, final_info=final_info, step=lambda action: step)
    *before, told = ServedEnv(env, ["x", "y"], ServerActivity(1), 0).step(None)
    assert len(before) == len(step)
    return told


def test_each_game_that_ended_has_a_row_in_the_order_of_environments() -> None:
    told = _stepped([True, False, True], {2: {"x": 3}, 0: {"x": 1, "y": 2.5, "z": 9}})
    assert told.dtype == np.float32
    np.testing.assert_array_equal(told, [[1, 2.5], [3, np.nan]])


def test_a_game_without_an_info_has_no_numbers() -> None:
    np.testing.assert_array_equal(_stepped([False, True, False], {}), [[np.nan, np.nan]])


def test_a_step_that_ends_no_game_tells_nothing() -> None:
    assert _stepped([False] * 3, {1: {"x": 1.0}}) is None


def test_a_stream_that_comes_back_plays_the_task_of_the_one_that_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    libtorchbeast = pytest.importorskip("libtorchbeast", exc_type=ImportError)
    monkeypatch.setattr(libtorchbeast, "Server", lambda make, *_, **__: make)
    arguments = {
        "env": EnvSpec("Catch,tasks_by_hand:late_catch").as_json(),
        **{"envs_per_stream": 1, "num_streams": 2, "num_servers": 1},
        **{"learners": [], "address": "unix:/a", "security": None},
    }
    make = server_main._make_server(arguments, ServerActivity(2), lambda report: None)
    streams = [make(), make()]
    for task in (1, 0):
        streams[task].close()
        streams[task] = make()
        assert tasks_of(streams) == [[0], [1]]
    early = make()  # before the environment of the stream that was lost is closed
    streams[1].close()
    assert tasks_of([streams[0], early]) == [[0], [0]]
    streams[0].close()
    assert tasks_of([make(), early]) == [[1], [0]]


def tasks_of(envs: list[VecEnv]) -> list[list[int]]:
    return [tasks_in(env.reset(1)).tolist() for env in envs]


def test_a_server_compares_the_tasks_of_all_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {
        "env": EnvSpec("Catch,Memory").as_json(),
        **{"envs_per_stream": 1, "num_streams": 2, "num_servers": 1},
    }
    with pytest.raises(UsageError, match="one agent needs tasks of equal spaces"):
        server_main._make_server(arguments, ServerActivity(2), lambda report: None)


class InDatabase:
    """Reads a database, which only the thread that opened it may use."""

    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:")

    def reset(self, *, seed: int | None = None) -> Any:
        return np.array(self._database.execute("select 1.0").fetchone(), np.float32), {}

    def step(self, action: int) -> Any:
        return *self.reset()[:1], 0.0, False, False, {}


def maker_of_streams(env_class: type[Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Returns the function by which a server makes the environments of a stream."""
    libtorchbeast = pytest.importorskip("libtorchbeast", exc_type=ImportError)
    monkeypatch.setattr(libtorchbeast, "Server", lambda make, *_, **__: make)
    arguments = {
        "env": EnvSpec(f"{__name__}:{env_class.__name__}").as_json(),
        **{"envs_per_stream": 1, "num_streams": 1, "num_servers": 1},
        **{"learners": [], "address": "unix:/a", "security": None},
    }
    make: Any = server_main._make_server(arguments, ServerActivity(1), lambda report: None)
    return make


def test_a_stream_makes_its_environments_in_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    make = maker_of_streams(InDatabase, monkeypatch)
    with ThreadPoolExecutor(1) as stream:
        assert stream.submit(lambda: make().reset(1)).result().tolist() == [[1.0]]


class Stuck(InDatabase):
    """Cannot be closed."""

    def close(self) -> None:
        raise RuntimeError("stuck")


def test_environments_that_cannot_be_closed_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert maker_of_streams(Stuck, monkeypatch)().reset(1).tolist() == [[1.0]]
