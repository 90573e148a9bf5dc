# SPDX-License-Identifier: Apache-2.0
"""Environments in the program's own process fail with errors that a user can read."""

from __future__ import annotations

import pytest

from torchbeast.envs.opening import make_environment
from torchbeast.errors import RunError, UsageError
from torchbeast.sources.servers import server_main as env_process


def test_make_environment_returns_the_environment() -> None:
    env = make_environment("Catch", 3)
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
        make_environment(env_id, 1)


def test_an_error_of_the_environment_is_shown_without_our_own_frames() -> None:
    with pytest.raises(RunError) as raised:
        make_environment("source_envs:CannotBeMade", 1)
    said = str(raised.value)
    assert said.startswith("source_envs:CannotBeMade cannot be made: ")
    assert said.endswith("OSError: no ROM in the slot")
    assert "source_envs.py" in said and "factory.py" not in said


def test_a_server_reports_the_environment_that_cannot_be_made() -> None:
    pytest.importorskip("libtorchbeast")
    with pytest.raises(RunError, match="^source_envs:CannotBeMade cannot be made: "):
        arguments = {"env": {"name": "source_envs:CannotBeMade"}, "envs_per_stream": 1}
        env_process._make_server(arguments)
