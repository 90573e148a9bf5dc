# SPDX-License-Identifier: Apache-2.0
"""Python environments of both interfaces, good and bad, behind SyncVecEnv."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import example_envs
import numpy as np
import pytest
from example_envs import EPISODE_LENGTH, Counting, Truncating
from gymnasium import spaces

from torchbeast.core.base.nest import flatten
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ArraySpec, observation_spec, random_action
from torchbeast.core.envs.sync_vec_env import SyncVecEnv, environment_seeds
from torchbeast.errors import UsageError

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


F, F64 = np.float32, np.float64
VECTOR = spaces.Box(-1, 9, (3,), F)

# A declared space, an observation that it can be converted from, and what becomes of it.
CONVERTED = [
    (VECTOR, np.array([1, 2, 3]), np.array([1, 2, 3], F)),
    (VECTOR, np.array([1, 2, 3.5]), np.array([1, 2, 3.5], F)),
    (VECTOR, np.array([1, 2, 3], ">f4"), np.array([1, 2, 3], F)),
    (VECTOR, np.array([True, False, True]), np.array([1, 0, 1], F)),
    (VECTOR, [1, 2.5, 3], np.array([1, 2.5, 3], F)),
    (spaces.Box(-1, 9, (3,), F64), np.array([1, 2, 3], F), np.array([1, 2, 3], F64)),
    (spaces.Box(0, 255, (2,), np.uint8), np.array([0, 255]), np.array([0, 255], np.uint8)),
    (spaces.MultiBinary(2), np.array([True, False]), np.array([1, 0], np.int8)),
    (spaces.MultiBinary(2), [1, 0], np.array([1, 0], np.int8)),
    (spaces.Box(0, 1, (2,), bool), np.array([1, 0]), np.array([True, False])),
    (spaces.Discrete(4), np.uint64(3), np.int64(3)),
]


@pytest.mark.parametrize(("space", "given", "expected"), CONVERTED, ids=str)
def test_an_observation_gets_the_dtype_that_its_space_declares(
    space: Any, given: Any, expected: Any
) -> None:
    class Declaring(Counting):
        """Its first observations are of the declared dtype, and later ones are not."""

        observation_space = space

        def observation(self) -> Any:
            return given if self.time else expected

    for kind in (Declaring, type("Always", (Declaring,), {"observation": lambda self: given})):
        env, _ = started(kind)
        observation = last_step(env, 1).observation
        assert observation.dtype == expected.dtype and observation[0].tolist() == expected.tolist()
        assert env.observation_space == observation_spec(space)


# A declared space, an observation that it does not describe, and the end of the message.
DIFFERENT = [
    (VECTOR, np.zeros(4, F), r": expected float32 of shape \(3,\), .* got float32 of shape \(4,\)"),
    (VECTOR, np.zeros(3, complex), ": expected float32 .* got complex128"),
    (VECTOR, {"x": 1}, r": .* got a dict with the keys \['x'\]"),
    (VECTOR, (1, (2, 3), 4), ": .* got a tuple of entries of different shapes"),
    (spaces.Box(0, 9, (3,), int), np.zeros(3), ": expected int64 .* got float64"),
    (spaces.Box(0, 9, (2,), np.uint8), [7, 300], ": .*uint8 between 0 and 255.* got 300 of int64"),
    (spaces.Box(0, 9, (2,), np.uint8), [7, -1], ": .*uint8 between 0 and 255.* got -1 of int64"),
    (spaces.Box(0, 1, (2,), bool), [0, 2], ": .*bool between 0 and 1.* got 2 of int64"),
    (spaces.Discrete(3), np.uint64(2**63), r": .*int64 .* got 9223372036854775808 of uint64"),
    (spaces.Dict(x=VECTOR), {"x": [1, 2]}, r"\['x'\]: .* got a list of length 2"),
    (spaces.Dict(x=VECTOR), {"x": [1, 2, 3], "y": 1}, r": .*keys \['x'\], .*keys \['x', 'y'\]"),
    (spaces.Dict(x=VECTOR), np.zeros(3, F), r": expected a dict .* got float32 of shape \(3,\)"),
    (spaces.Tuple([VECTOR, VECTOR]), ([1, 2, 3],), ": .*tuple of length 2.* got a tuple of .* 1"),
]


@pytest.mark.parametrize(("space", "given", "message"), DIFFERENT, ids=str)
def test_an_observation_unlike_its_declared_space_is_refused_at_any_step(
    space: Any, given: Any, message: str
) -> None:
    class Declaring(Counting):
        observation_space = space

        def observation(self) -> Any:
            return given if self.time else space.sample()

    always = type("Always", (Declaring,), {"observation": lambda self: given})
    with pytest.raises(UsageError, match="^environment 0 of Example-v0: observation" + message):
        started(always)
    env, _ = started(Declaring, Declaring)
    where = "^environment 0 of Example-v0, step 1 of the episode: observation"
    with pytest.raises(ValueError, match=where + message):
        last_step(env, 1)


class Pair(example_envs.Legacy):
    """Its observations are pairs, which reset returns without an info."""

    observation_space = spaces.Tuple([spaces.Discrete(9), spaces.Discrete(9)])

    def observation(self) -> Any:
        return 1, self.time


class Flat(Pair):
    observation_space = spaces.Box(0, 9, (2,), F)


@pytest.mark.parametrize("kind", [Pair, Flat])
@pytest.mark.parametrize("infos", [(), ({},), ({"x": 1},)])
def test_a_pair_is_an_observation_unless_its_second_part_is_an_info(kind: Any, infos: Any) -> None:
    class Resetting(kind):  # type: ignore[misc]
        def reset(self) -> Any:
            observation = super().reset()
            return (observation, *infos) if infos else observation

    env, observation = started(Resetting)
    assert [leaf[0].tolist() for leaf in flatten(observation)] in ([1, 0], [[1.0, 0.0]])
    assert [leaf[0].tolist() for leaf in flatten(last_step(env, 1).observation)] in (
        [1, 1],
        [[1.0, 1.0]],
    )


class Info:
    """An info of a class of its own."""

    def __repr__(self) -> str:
        return "Info()"  # the same name of the test in every process


# Values after the reward, and whether they are terminated or truncated.
ENDINGS = [
    ((True, False, {}), (True, False)),
    ((False, True, {}), (False, True)),
    ((False, True, None), (False, True)),
    ((False, True, Info()), (False, True)),
    ((False, np.bool_(True), {"TimeLimit.truncated": False}), (False, True)),
    ((np.array([False]), 1, {}), (False, True)),
    ((True, {}), (True, False)),
    ((True, None), (True, False)),
    ((True, {"TimeLimit.truncated": True}), (False, True)),
]


@pytest.mark.parametrize(("values", "expected"), ENDINGS, ids=str)
def test_five_values_are_gymnasiums_and_four_are_legacy_gyms(
    values: tuple[Any, ...], expected: Any
) -> None:
    kind = type("Ending", (Counting,), {"step": lambda self, _: (self.observation(), 1.0, *values)})
    step = last_step(started(kind)[0], 1)
    assert (step.terminated.tolist(), step.truncated.tolist()) == tuple([end] for end in expected)


@pytest.mark.parametrize("values", [(), (True,), (True, False, {}, {})], ids=str)
def test_a_step_of_neither_four_nor_five_values_is_refused(values: tuple[Any, ...]) -> None:
    kind = type("Ending", (Counting,), {"step": lambda self, _: (self.observation(), 1.0, *values)})
    with pytest.raises(ValueError, match=f"returned tuple of {2 + len(values)} values, expected"):
        last_step(started(kind)[0], 1)


@pytest.mark.parametrize("values", [(True, {}, {}), (None, False, {}), ({}, {}, {}), ("no", {})])
def test_an_end_that_is_neither_true_nor_false_is_refused(values: Any) -> None:
    kind = type("Ending", (Counting,), {"step": lambda self, _: (self.observation(), 1.0, *values)})
    with pytest.raises(ValueError, match="environment 0 of .* expected True or False as termin"):
        last_step(started(kind)[0], 1)


NOT_FINITE = [math.nan, math.inf, -math.inf, 1e300]


class Diverging(Truncating):
    """An entry of its observations is `value` at one time of the first or a later episode."""

    observation_space = spaces.Dict(x=spaces.Box(-9, 9, (3,), F), y=spaces.Discrete(9))
    value, at, episode, episodes = math.nan, 2, 0, -1

    def reset(self, **kwargs: Any) -> Any:
        self.episodes += 1
        return super().reset(**kwargs)

    def observation(self) -> Any:
        x = np.zeros(3)
        if (self.time, self.episodes) == (self.at, self.episode):
            x[1] = self.value
        return {"x": x, "y": 1}


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize(("at", "episode"), [(0, 0), (2, 0), (EPISODE_LENGTH, 0), (0, 1), (3, 1)])
def test_an_observation_that_is_not_finite_is_refused_where_it_arises(
    value: float, at: int, episode: int
) -> None:
    fault = type("Fault", (Diverging,), {"value": value, "at": at, "episode": episode})
    env = SyncVecEnv([Diverging, fault], "Example-v0")
    env._envs[0].value = 0.0
    message = rf"environment 1 of Example-v0, step {at} of the episode: expected finite float32 in "
    with (
        np.errstate(all="raise"),
        pytest.raises(
            ValueError, match=message + r"the observation\['x'\], got .* at \[1\]$"
        ) as error,
    ):
        env.reset(3)
        last_step(env, 2 * EPISODE_LENGTH)
    assert f" got {np.inf if value == 1e300 else value} at" in str(error.value)
    assert env._envs[1].episodes == episode


def test_an_observation_that_nobody_sees_may_be_anything() -> None:
    """The last one of an episode that terminated is neither acted on nor learnt from."""
    kind = type("Fault", (Diverging,), {"at": EPISODE_LENGTH, "ending": Counting.ending})
    env, _ = started(kind)
    assert last_step(env, EPISODE_LENGTH).terminated.all()


X, Y = np.zeros((2, 3), np.float32), 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": X[:1], "y": Y}, r"\['x'\]: expected float32 of shape \(2, 3\).*of shape \(1, 3\)"),
        ({"x": X, "y": 1.0}, r"\['y'\]: expected int64 .* got float64"),
        ({"x": X, "y": (1,)}, r"\['y'\]: expected int64 .* got a tuple of length 1"),
        ((X, Y), r": expected a dict .* got a tuple of length 2"),
        (None, r": expected a dict .* got object"),
    ],
)
def test_without_a_declared_space_the_first_observation_is_it(changed: Any, message: str) -> None:
    kind = type("Changed", (example_envs.Changing,), {"changed": changed})
    env, _ = started(example_envs.Changing, kind)
    with pytest.raises(
        ValueError,
        match=r"^environment 1 of Example-v0, step . of the episode: observation" + message,
    ):
        last_step(env, 2)


class OneArray(example_envs.Changing):
    unchanged = np.zeros((2, 3), np.int32)
    changed = np.full((2, 3), 7, np.int32)


@pytest.mark.parametrize("changed", [[[7, 7, 7]], np.int32(7), np.full((1, 3), 7, np.int32)])
def test_an_array_that_could_fill_the_first_is_refused_all_the_same(changed: Any) -> None:
    env, _ = started(type("Changed", (OneArray,), {"changed": changed}))
    with pytest.raises(ValueError, match=r"observation: expected int32 of shape \(2, 3\)"):
        last_step(env, 2)


def test_an_array_like_the_first_is_copied_into_its_row() -> None:
    env, _ = started(OneArray, OneArray)
    observation = last_step(env, 2).observation
    assert observation.dtype == np.int32 and observation.tolist() == [[[7] * 3] * 2] * 2


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
    where = "environment 1 of Example-v0, step 1 of the episode: expected a finite reward"
    with pytest.raises(ValueError, match=where):
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


def test_an_action_in_a_box_of_integers_arrives_in_its_shape_and_dtype() -> None:
    space = spaces.Box(np.array([[2], [-1]]), np.array([[3], [1]]), dtype=np.int16)
    kind = type("Grid", (Counting,), {"action_space": space})
    env, _ = started(kind)
    drawn = [random_action(env.action_space, 1, np.random.default_rng(i)) for i in range(20)]
    for action in drawn:
        env.step(action)
    received = env._envs[0].actions
    assert all(space.contains(action) for action in received)
    assert len({tuple(action.ravel()) for action in received}) == 6


def test_an_environment_without_an_action_space_is_refused() -> None:
    kind = type("Spaceless", (Counting,), {"action_space": None})
    with pytest.raises(ValueError, match="environment 0 of Example-v0: .* without action_space"):
        SyncVecEnv([kind], "Example-v0")


def test_an_unknown_action_space_is_refused_by_name() -> None:
    kind = type("Texting", (Counting,), {"action_space": spaces.Text(5)})
    with pytest.raises(ValueError, match=r"environment 0 of Example-v0: .* type Text"):
        SyncVecEnv([kind], "Example-v0")


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


def test_environments_of_different_action_spaces_are_refused() -> None:
    kind = type("Other", (Counting,), {"action_space": spaces.Discrete(9)})
    with pytest.raises(ValueError, match=r"environment 1 .* expected .*n=2.* got .*n=9"):
        SyncVecEnv([Counting, kind], "Example-v0")


@pytest.mark.parametrize(
    "wrong", [{"action_space": spaces.Text(5)}, {"observation": lambda self: "text"}]
)
def test_environments_that_are_refused_are_closed(wrong: dict[str, Any]) -> None:
    made: list[Counting] = []

    def make(kind: type[Counting]) -> Counting:
        made.append(kind())
        return made[-1]

    odd = type("Odd", (Counting,), wrong)
    with pytest.raises(UsageError):
        SyncVecEnv([lambda: make(odd), lambda: make(Counting)], "Example-v0")
    assert [env.closed for env in made] == [True, True]


def test_an_environment_that_cannot_be_closed_does_not_hide_why_it_is_refused() -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("stuck")

    kind = type("Spaceless", (Counting,), {"action_space": None, "close": fail})
    with pytest.raises(UsageError, match="without action_space"):
        SyncVecEnv([kind], "Example-v0")
