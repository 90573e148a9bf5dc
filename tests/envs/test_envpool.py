# SPDX-License-Identifier: Apache-2.0
"""EnvPool's tasks are found by their names, and play as the pools do when stepped by hand."""

from __future__ import annotations

import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from torchbeast import envs
from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.spaces import random_action
from torchbeast.core.envs.vec_env import environment_seeds
from torchbeast.envs import envpool

E, STEPS = 3, 120


def pool(task: str, **options: Any) -> Any:
    module = pytest.importorskip("envpool")
    return module.make(task, env_type="gymnasium", num_envs=1, num_threads=1, **options)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("CartPole-v1", {}),
        ("Pendulum-v1", {"max_episode_steps": 50}),
        ("MiniGrid-Empty-5x5-v0", {}),
    ],
)
def test_each_environment_plays_as_a_pool_of_its_own(task: str, options: dict[str, Any]) -> None:
    """A pool resets an environment in the step after the end, whose action it ignores."""
    alone = [pool(task, seed=seed, **options) for seed in environment_seeds(5, E)]
    with closing(envs.make(envs.EnvSpec(f"envpool:{task}", options), E)) as env:
        seen = flatten(env.reset(5))
        firsts = [each.reset()[0] for each in alone]
        rng, ends = np.random.default_rng(0), 0
        for _ in range(STEPS):
            for e, first in enumerate(firsts):
                for leaf, expected in zip(seen, flatten(first), strict=True):
                    np.testing.assert_array_equal(leaf[e], expected[0])
            action = random_action(env.action_space, E, rng)
            step = env.step(action)
            finals = iter(range(E))
            for e, each in enumerate(alone):
                own = np.asarray(action)[e : e + 1]
                firsts[e], reward, terminated, truncated, _ = each.step(own)
                assert step.reward[e] == np.float32(reward[0])
                assert (step.terminated[e], step.truncated[e]) == (terminated[0], truncated[0])
                if truncated[0]:
                    number = next(finals)
                    rows = zip(flatten(step.final_observation), flatten(firsts[e]), strict=True)
                    for leaf, expected in rows:
                        np.testing.assert_array_equal(leaf[number], expected[0])
                if terminated[0] or truncated[0]:
                    assert int(env.final_info[e]["elapsed_step"]) > 0  # type: ignore[attr-defined]
                    firsts[e] = each.step(own)[0]
                    ends += 1
            seen = flatten(step.observation)
        assert step.resets is None and ends >= E


def test_atari_games_send_single_frames_for_the_policy_to_stack() -> None:
    pytest.importorskip("envpool")
    with closing(envs.make("envpool:Pong-v5", 2)) as env:
        assert env.frame_stack == 4
        assert flatten(env.reset(1))[0].shape == (2, 1, 84, 84)
    stacked = envs.EnvSpec("envpool:Pong-v5", {"stack_num": 2})
    with closing(envs.make(stacked, 2)) as env:
        assert env.frame_stack == 1
        assert flatten(env.reset(1))[0].shape == (2, 2, 84, 84)


def fake(version: str = "1.2.5", **changes: Any) -> Any:
    config = SimpleNamespace(_asdict=lambda: {"num_envs": 1, "frame_skip": 4, "noop_max": 30})
    named: dict[str, Any] = {
        "__version__": version,
        "list_all_envs": lambda: ["Pong-v5", "CoinrunEasy-v0"],
        "make_spec": lambda task: SimpleNamespace(config=config),
        **changes,
    }
    return SimpleNamespace(**named)


def without_qt(task: str) -> Any:
    raise ImportError("EnvPool Procgen requires the system Qt 5 runtime")


@pytest.mark.parametrize(
    ("module", "spec", "said"),
    [
        (fake(), envs.EnvSpec("envpool:Pogn-v5"), "no task 'Pogn-v5'; did you mean Pong-v5"),
        (fake(), envs.EnvSpec("envpool:procgen/Maze-v0"), "EnvPool has no task 'procgen/Maze-v0'"),
        (
            fake(),
            envs.EnvSpec("envpool:Pong-v5", {"frame_skp": 2}),
            "takes no 'frame_skp'; did you mean frame_skip.* it takes frame_skip noop_max$",
        ),
        (
            fake(),
            envs.EnvSpec("envpool:Pong-v5", {"num_envs": 2}),
            "takes no 'num_envs'",
        ),
        (
            fake("0.8.4"),
            envs.EnvSpec("envpool:Pong-v5"),
            "needs EnvPool 1 or newer, got 0.8.4: pip",
        ),
        (
            fake(make_spec=without_qt),
            envs.EnvSpec("envpool:procgen/CoinrunEasy-v0"),
            "CoinrunEasy-v0: EnvPool Procgen requires the system Qt 5 runtime",
        ),
        (
            fake(),
            envs.EnvSpec("envpool:Pong-v5", options=envs.EnvOptions(mask_actions=True)),
            "has no action masks: remove mask_actions",
        ),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_sentence(
    module: Any, spec: envs.EnvSpec, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(envpool, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "envpool", module)
    with pytest.raises(envs.EnvError, match=said) as error:
        envs.make(spec, 1)
    assert "\n" not in str(error.value)


def test_without_envpool_its_names_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envpool, "find_spec", lambda name: None)
    with pytest.raises(envs.EnvError, match=r"pip install 'torchbeast\[envpool\]'"):
        envs.make("envpool:Pong-v5", 1)
