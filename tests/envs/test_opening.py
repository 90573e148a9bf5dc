# SPDX-License-Identifier: Apache-2.0
"""Environments that cannot be made fail with errors that a user can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbeast.envs import EnvSpec, make_environment
from torchbeast.errors import RunError, UsageError
from torchbeast.servers import server_main as env_process


def test_make_environment_returns_the_environment() -> None:
    env = make_environment(EnvSpec("Catch"), 3)
    assert env.num_envs == 3
    env.close()


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("NoSuchEnvironment-v0", "NoSuchEnvironment"),
        ("no_such_module:make", "no module no_such_module"),
        ("source_envs:NoSuchClass", "has no 'NoSuchClass'"),
    ],
)
def test_a_wrong_name_is_a_usage_error(env_id: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make_environment(EnvSpec(env_id), 1)


def test_an_exhausted_iterator_in_an_environment_is_an_error_like_others() -> None:
    with pytest.raises(
        RunError, match="^source_envs:HasNoNext cannot be made: (?s:.*)StopIteration"
    ):
        make_environment(EnvSpec("source_envs:HasNoNext"), 1)


def test_an_error_of_the_environment_is_shown_without_our_own_frames() -> None:
    with pytest.raises(RunError) as raised:
        make_environment(EnvSpec("source_envs:CannotBeMade"), 1)
    said = str(raised.value)
    assert said.startswith("source_envs:CannotBeMade cannot be made: ")
    assert said.endswith("OSError: no ROM in the slot")
    assert "source_envs.py" in said and "__init__.py" not in said


CODE = """
import numpy as np
from gymnasium import spaces

class Box3:
    observation_space, action_space = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)

    def reset(self, seed=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        raise NotImplementedError

class Constructor(Box3):
    def __init__(self):
        int("12 px")  # the bug

class Reset(Box3):
    def reset(self, seed=None):
        np.zeros(3)[:] = np.ones(4)  # the bug

class Spaces(Box3):
    @property
    def observation_space(self):
        raise ValueError("no space")  # the bug

class Ending(Box3):
    def __init__(self):
        raise SystemExit  # the bug

class Vector(Constructor):
    def __init__(self, num_envs):
        super().__init__()
"""


@pytest.mark.parametrize("name", ["Constructor", "Reset", "Spaces", "Ending", "Vector", "missing"])
def test_an_exception_of_any_type_in_a_users_environment_keeps_name_and_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "site-packages" / f"users_envs_{name}.py"
    file.parent.mkdir()
    file.write_text(CODE if name != "missing" else "import numpy\nnumpy.zeros(-1)  # the bug\n")
    monkeypatch.syspath_prepend(file.parent)
    env_id = f"{file.stem}:{name}"
    with pytest.raises(RunError, match=f"^{env_id} cannot be made: Traceback") as raised:
        make_environment(EnvSpec(env_id), 1)
    assert f'File "{file}"' in str(raised.value) and "# the bug" in str(raised.value)


def test_a_server_reports_the_environment_that_cannot_be_made() -> None:
    pytest.importorskip("libtorchbeast")
    with pytest.raises(RunError, match="^source_envs:CannotBeMade cannot be made: "):
        arguments = {
            "env": {"name": "source_envs:CannotBeMade"},
            "envs_per_stream": 1,
            "num_streams": 1,
        }
        env_process._make_server(arguments, env_process.ServerActivity(1), lambda report: None)
