# SPDX-License-Identifier: Apache-2.0
"""Lets evaluations play in the process of the tests, to save the start of a child process."""

from __future__ import annotations

from typing import Any

import pytest

from torchbeast.envs import make_environment
from torchbeast.envs.spec import EnvSpec
from torchbeast.evaluation import agent as agent_module
from torchbeast.evaluation import play as play_module


def env_in_this_process(spec: EnvSpec, num_envs: int, *, render: bool = False, **_: Any) -> Any:
    """Stands in for EnvProcess, which has its own tests."""
    env: Any = make_environment(spec, num_envs, render)
    if not hasattr(env, "render"):
        env.render = lambda: None
    return env


@pytest.fixture(autouse=True)
def _in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (agent_module, play_module):
        monkeypatch.setattr(module, "EnvProcess", env_in_this_process)
