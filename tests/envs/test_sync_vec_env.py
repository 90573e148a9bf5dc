# SPDX-License-Identifier: Apache-2.0
"""Python environments of both interfaces, good and bad, behind SyncVecEnv."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import example_envs
import numpy as np
import pytest
from example_envs import EPISODE_LENGTH, Counting
from gymnasium import spaces

from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.envs.vec_env import SyncVecEnv, VecStep, environment_seeds

NO_ACTION = np.zeros(2, np.int64)


def started(*factories: Callable[[], Any]) -> tuple[SyncVecEnv, np.ndarray]:
    env = SyncVecEnv(factories, "Example-v0")
    return env, env.reset(3)


def last_step(env: SyncVecEnv, num_steps: int = EPISODE_LENGTH) -> VecStep:
    for _ in range(num_steps):
        step = env.step(np.zeros(env.num_envs, np.int64))
    return step


def offsets(num_envs: int = 2) -> np.ndarray:
    """Returns [E, 1], which the examples add to their observations after reset(3)."""
    return np.array([[seed % 1000] for seed in environment_seeds(3, num_envs)], np.float32)


@pytest.mark.parametrize("kind", [Counting, example_envs.Legacy, example_envs.Wrapper])
def test_both_interfaces_are_stepped_and_seeded(kind: type) -> None:
    env, observation = started(kind, kind)
    np.testing.assert_array_equal(observation, offsets())
    step = env.step(NO_ACTION)
    np.testing.assert_array_equal(step.observation, offsets() + 1)
    assert step.reward.tolist() == [0.5, 0.5]
    assert not step.terminated.any() and not step.truncated.any() and not step.episode_end.any()


@pytest.mark.parametrize("kind", [Counting, example_envs.Legacy])
def test_an_ended_episode_shows_the_first_observation_of_the_next(kind: type) -> None:
    env, _ = started(kind, kind)
    step = last_step(env)
    assert step.terminated.all() and step.episode_end.all() and not step.truncated.any()
    np.testing.assert_array_equal(step.observation, offsets())
    np.testing.assert_array_equal(env.step(NO_ACTION).observation, offsets() + 1)


@pytest.mark.parametrize(
    "kind",
    [example_envs.Truncating, example_envs.LegacyWithTimeLimit, example_envs.ReusingItsBuffer],
)
def test_a_time_limit_gives_the_final_observation_too(kind: type) -> None:
    env, _ = started(kind, kind)
    step = last_step(env)
    assert step.truncated.all() and step.episode_end.all() and not step.terminated.any()
    np.testing.assert_array_equal(step.final_observation, offsets() + EPISODE_LENGTH)
    np.testing.assert_array_equal(step.observation, offsets())


def test_final_observations_are_those_of_the_truncated_environments_only() -> None:
    env, _ = started(Counting, example_envs.Truncating, Counting, example_envs.Truncating)
    step = last_step(env)
    assert step.truncated.tolist() == [False, True, False, True]
    expected = offsets(4)[[1, 3]] + EPISODE_LENGTH
    np.testing.assert_array_equal(step.final_observation, expected)


def test_a_terminated_episode_is_not_truncated_in_the_same_step() -> None:
    env, _ = started(example_envs.BothAtOnce)
    step = last_step(env)
    assert step.terminated.all() and not step.truncated.any() and step.final_observation is None


def test_a_legacy_time_limit_counts_at_the_end_of_an_episode_only() -> None:
    env, _ = started(example_envs.LegacyWithTimeLimit)
    assert not last_step(env, EPISODE_LENGTH - 1).truncated.any()


@pytest.mark.parametrize("rest", [(), ("anything",), ({}, "more", 3)])
def test_a_legacy_step_may_return_anything_after_done(rest: tuple[Any, ...]) -> None:
    class Short(example_envs.Legacy):
        def step(self, action: Any) -> tuple[Any, ...]:
            return (*super().step(action)[:3], *rest)

    env, _ = started(Short)
    assert last_step(env).terminated.all()


def test_environments_that_share_their_buffer_keep_their_own_observations() -> None:
    env, observation = started(example_envs.ReusingItsBuffer, example_envs.ReusingItsBuffer)
    np.testing.assert_array_equal(observation, offsets())
    env.step(NO_ACTION)
    np.testing.assert_array_equal(observation, offsets())


def test_only_the_seeded_reset_is_seeded() -> None:
    made: list[Counting] = []

    def make() -> Counting:
        made.append(Counting())
        return made[-1]

    env, _ = started(make, make)
    last_step(env)
    first, second = environment_seeds(3, 2)
    assert made[0].seeds == [None, first, None]  # the first None: a look at an observation
    assert made[1].seeds == [second, None]


def test_nests_of_numbers_keep_their_structure_and_dtypes() -> None:
    env, observation = started(example_envs.LegacyDict)
    int64, float64 = ArraySpec((), "int64"), ArraySpec((), "float64")
    image = ArraySpec((2, 3), "uint8")
    assert env.observation_space == {"image": image, "pair": (int64, (int64, float64))}
    assert list(observation) == ["image", "pair"]
    step = env.step(np.zeros(1, np.int64))
    assert step.observation["image"].tolist() == [[[1] * 3] * 2]
    assert step.observation["pair"][0].tolist() == [1]


def test_ranges_of_values_come_from_the_space() -> None:
    class Bounded(Counting):
        observation_space = spaces.Box(0, 9, offsets().shape[1:], offsets().dtype)

    env, _ = started(Bounded)
    spec = env.observation_space
    assert isinstance(spec, ArraySpec) and (spec.low, spec.high) == (0, 9)


X, Y = np.zeros((2, 3), np.float32), 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X[:1], "y": Y}, r"\['x'\]: expected float32 of shape \(2, 3\).*of shape \(1, 3\)"),
        ({"x": X.astype(complex), "y": Y}, r"\['x'\]: expected float32 .* got complex128"),
        ({"x": X, "y": np.uint64(1)}, r"\['y'\]: expected int64 .* got uint64"),
        ({"x": X, "y": 1.0}, r"\['y'\]: expected int64 .* got float64"),
        ({"x": X, "y": (1,)}, r"\['y'\]: expected int64 .* got a tuple of length 1"),
        (
            {"x": X},
            r": expected a dict with the keys \['x', 'y'\] as in the first .*, got .* \['x'\]",
        ),
        ({"x": X, "y": Y, "z": 1}, r": .* got a dict with the keys \['x', 'y', 'z'\]"),
        (X, r": expected a dict .* got float32 of shape \(2, 3\)"),
        ((X, Y), r": expected a dict .* got a tuple of length 2"),
        (None, r": expected a dict .* got object"),
    ],
)
def test_an_observation_unlike_the_first_is_refused_with_both_shapes(
    changed: Any, message: str
) -> None:
    kind = type("Changed", (example_envs.Changing,), {"changed": changed})
    env, _ = started(example_envs.Changing, kind)
    with pytest.raises(ValueError, match=r"^environment 1 of Example-v0: observation" + message):
        last_step(env, 2)


class OneArray(example_envs.Changing):
    unchanged = np.zeros((2, 3), np.int32)
    changed = np.full((2, 3), 7, np.int32)


@pytest.mark.parametrize("changed", [[[7, 7, 7]], np.int32(7), np.full((1, 3), 7, np.int32)])
def test_an_array_that_could_fill_the_first_is_refused_all_the_same(changed: Any) -> None:
    env, _ = started(type("Changed", (OneArray,), {"changed": changed}))
    with pytest.raises(ValueError, match=r"observation: expected int32 of shape \(2, 3\)"):
        last_step(env, 2)


def test_an_array_whose_numbers_would_be_cut_off_is_refused() -> None:
    env, _ = started(type("Changed", (OneArray,), {"changed": np.full((2, 3), 7.9)}))
    with pytest.raises(ValueError, match=r"expected int32 of shape .* got float64"):
        last_step(env, 2)


def test_an_array_like_the_first_is_copied_into_its_row() -> None:
    env, _ = started(OneArray, OneArray)
    observation = last_step(env, 2).observation
    assert observation.dtype == np.int32 and observation.tolist() == [[[7] * 3] * 2] * 2


@pytest.mark.parametrize("x", [X.astype(kind) for kind in (float, ">f4", np.float16, int)])
@pytest.mark.parametrize("y", [1, np.int8(1), True])
def test_scalars_of_another_width_get_the_dtype_of_the_first(x: Any, y: Any) -> None:
    kind = type("Changed", (example_envs.Changing,), {"changed": {"x": x + 3, "y": y}})
    env, _ = started(kind)
    observation = last_step(env, 2).observation
    assert observation["x"].dtype == np.float32 and observation["x"].tolist() == [[[3.0] * 3] * 2]
    assert observation["y"].dtype == np.int64 and observation["y"].tolist() == [1]


def test_environments_of_different_observations_are_refused() -> None:
    env = SyncVecEnv([Counting, example_envs.LegacyDict], "Example-v0")
    with pytest.raises(ValueError, match=r"environment 1 .* expected float32 .* got a dict"):
        env.reset(0)


@pytest.mark.parametrize("observation", ["text", None, {"x": np.array([object()])}, 1j])
def test_an_observation_that_is_no_number_is_refused_at_once(observation: Any) -> None:
    kind = type("Odd", (Counting,), {"observation": lambda self: observation})
    with pytest.raises(ValueError, match=r"environment 0 of Example-v0: observation.* has dtype"):
        SyncVecEnv([kind], "Example-v0")


def test_a_key_that_is_no_string_is_refused_at_once() -> None:
    kind = type("Odd", (Counting,), {"observation": lambda self: {1: 2.0}})
    with pytest.raises(ValueError, match="has the key 1 of type int, expected a string$"):
        SyncVecEnv([kind], "Example-v0")


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e39, None, "1x", [1.0, 2.0]])
def test_a_reward_that_is_no_finite_number_is_refused(reward: Any) -> None:
    env, _ = started(Counting, example_envs.with_reward(reward))
    with pytest.raises(ValueError, match="environment 1 of Example-v0: expected a finite reward"):
        env.step(NO_ACTION)


@pytest.mark.parametrize("reward", [2, np.float64(2), np.array(2), np.array([[2.0]]), [2]])
def test_a_reward_of_any_numeric_type_becomes_float32(reward: Any) -> None:
    env, _ = started(example_envs.with_reward(reward))
    step = env.step(np.zeros(1, np.int64))
    assert step.reward.dtype == np.float32 and step.reward.tolist() == [2.0]


@pytest.mark.parametrize("result", [None, (1, 2), [1, 2, 3, 4, 5]])
def test_a_step_that_returns_something_else_is_refused(result: Any) -> None:
    kind = type("Odd", (Counting,), {"step": lambda self, action: result})
    env, _ = started(kind)
    with pytest.raises(ValueError, match=r"step returned .*, expected \(observation, reward"):
        env.step(np.zeros(1, np.int64))


def test_an_exception_of_the_environment_passes_unchanged() -> None:
    env, _ = started(example_envs.Failing)
    with pytest.raises(KeyError, match="own failure"):
        env.step(np.zeros(1, np.int64))


def test_each_environment_gets_its_own_action() -> None:
    env, _ = started(Counting, Counting)
    env.step(np.array([1, 0]))
    actions = [one.actions[0] for one in env._envs]
    assert actions == [1, 0] and all(action.shape == () for action in actions)
    assert {action.dtype for action in actions} == {np.dtype(np.int64)}


def test_box_actions_are_clipped_and_cast_to_their_space() -> None:
    box = spaces.Box(-1, np.array([1, np.inf], np.float32), dtype=np.float32)
    kind = type("Continuous", (Counting,), {"action_space": box})
    env, _ = started(kind)
    env.step(np.array([[-3.0, 5.0]]))
    action = env._envs[0].actions[0]
    assert action.tolist() == [-1.0, 5.0] and action.dtype == np.float32 and box.contains(action)


def test_nested_actions_arrive_as_the_environments_nest() -> None:
    space = spaces.Dict(move=spaces.Discrete(3), keys=spaces.MultiBinary(2))
    kind = type("Nested", (Counting,), {"action_space": space})
    env, _ = started(kind, kind)
    env.step({"keys": np.array([[0, 1], [1, 1]]), "move": np.array([2, 0])})
    action = env._envs[1].actions[0]
    assert action["keys"].tolist() == [1, 1] and action["move"] == 0


def test_an_environment_without_an_action_space_is_refused() -> None:
    kind = type("Spaceless", (Counting,), {"action_space": None})
    with pytest.raises(ValueError, match="environment 0 of Example-v0 has no action_space"):
        SyncVecEnv([kind], "Example-v0")


def test_an_unknown_action_space_is_refused_by_name() -> None:
    kind = type("Texting", (Counting,), {"action_space": spaces.Text(5)})
    with pytest.raises(ValueError, match=r"environment 0 of Example-v0: .* type Text"):
        SyncVecEnv([kind], "Example-v0")


def test_environments_of_different_action_spaces_are_refused() -> None:
    kind = type("Other", (Counting,), {"action_space": spaces.Discrete(9)})
    with pytest.raises(ValueError, match=r"environment 1 .* expected .*n=2.* got .*n=9"):
        SyncVecEnv([Counting, kind], "Example-v0")


def test_close_closes_every_environment_even_when_one_fails_to() -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("stuck")

    env, _ = started(Counting, type("Stuck", (Counting,), {"close": fail}), Counting)
    with pytest.raises(RuntimeError, match="stuck"):
        env.close()
    assert env._envs[0].closed and env._envs[2].closed


def test_seeds_of_environments_are_different_and_small_enough_for_every_library() -> None:
    seeds = [seed for run in range(20) for seed in environment_seeds(run, 50)]
    assert len(set(seeds)) == len(seeds) == 1000
    assert min(seeds) >= 0 and max(seeds) < 2**31
