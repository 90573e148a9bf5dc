# SPDX-License-Identifier: Apache-2.0
"""Objects that are not environments are refused, each with its own message."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from example_envs import Counting
from gymnasium import spaces

from torchbeast import envs
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import vec_env_of
from torchbeast.envs import make_environment
from torchbeast.errors import UsageError


class StableBaselines:
    """The attributes of Stable-Baselines3's VecEnv."""

    num_envs = 2
    observation_space = spaces.Box(0, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self) -> Any:
        return [[0.0, 0.0]]

    def step_async(self, actions: Any) -> None: ...

    step_wait = step = close = reset


class Refused(Counting):
    """An environment whose spaces may be given."""

    def __init__(self, **spaces_given: Any) -> None:
        super().__init__()
        vars(self).update(spaces_given)


@pytest.mark.parametrize("mask_actions", [False, True])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"action_space": spaces.Text(3)}, "action space: a space of type Text is not supported"),
        ({"action_space": spaces.Box(0, 2**20, (1,), int)}, "action space: each entry of a Box of"),
    ],
)
def test_spaces_are_refused_with_and_without_masks(
    given: dict[str, Any], said: str, mask_actions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{__name__}:refused"
    monkeypatch.setattr(sys.modules[__name__], "refused", lambda: Refused(**given), raising=False)
    options = envs.EnvOptions(mask_actions=mask_actions)
    with pytest.raises(UsageError, match=f"^environment 0 of {name}: {said}"):
        make_environment(envs.EnvSpec(name, options=options), 1)


def contract(**changes: Any) -> Any:
    """Returns an object with the attributes of a VecEnv, of which None are left out."""
    env: dict[str, Any] = {"num_envs": 1, "env_id": "x", "frame_stack": 1, **changes}
    env = {"observation_space": ArraySpec((), "float32"), "action_space": Discrete(2), **env}
    env = {"reset": print, "step": print, "close": print, **env}
    return SimpleNamespace(**{name: value for name, value in env.items() if value is not None})


OF_ANY = [(None, "got a NoneType with")]
OF_ONE = [
    (StableBaselines(), "is a vector environment itself: add a parameter num_envs"),
    (
        "CartPole-v1",
        "expected an environment with Gymnasium's interface, got a str without reset, ",
    ),
    ((Counting(), {}), "got a tuple without reset, step, action_space$"),
    (SimpleNamespace(reset=print, step=print), "got a .*SimpleNamespace without action_space$"),
    (contract(), "is a vector environment itself: add a parameter num_envs"),
]
OF_SEVERAL = [
    (StableBaselines(), "called with num_envs=1, the factory must return a VecEnv"),
    (Counting(), "called with num_envs=1, .*; a function without the parameter num_envs returns"),
    ([Counting()], "called with num_envs=1, the factory must return a VecEnv"),
    (
        contract(observation_space=spaces.Box(0, 1, (2,))),
        r"a VecEnv needs torchbeast's spaces, got Box\(.*: convert it by observation_spec",
    ),
    (
        contract(action_space=spaces.Discrete(2)),
        r"a VecEnv needs torchbeast's spaces, got Discrete\(2\): .* from_gymnasium",
    ),
]


def refused(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as error:
        vec_env_of(make, {}, 1, "mine")
    assert "mine" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("returned", "message"), OF_ANY + OF_ONE, ids=lambda v: str(v)[:30])
def test_what_is_returned_as_one_environment_must_be_one(returned: Any, message: str) -> None:
    refused(lambda: returned, message)


@pytest.mark.parametrize(("returned", "message"), OF_ANY + OF_SEVERAL, ids=lambda v: str(v)[:30])
def test_what_is_returned_as_several_environments_must_be_so_many(
    returned: Any, message: str
) -> None:
    refused(lambda num_envs: returned, message)


def test_the_vector_environments_of_the_contract_are_taken_as_they_are() -> None:
    for env in (contract(), SyncVecEnv([Counting], "x")):
        assert vec_env_of(lambda num_envs, env=env: env, {}, 1, "mine") is env
