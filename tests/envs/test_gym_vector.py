# SPDX-License-Identifier: Apache-2.0
"""Gymnasium's own vector environments, beside the same environments in a SyncVecEnv."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import NormalizeObservation, NormalizeReward

from torchbeast import envs
from torchbeast.core.base.nest import flatten, map_leaves, map_leaves2, pack_as
from torchbeast.core.envs import VecEnv
from torchbeast.core.envs.contract import is_gym_vector, picture_of
from torchbeast.core.envs.gym_vector import GymVectorEnv
from torchbeast.core.envs.spaces import random_action
from torchbeast.core.envs.sync_vec_env import SyncVecEnv, environment_seeds
from torchbeast.core.envs.vec_env import adopted, vec_env_of
from torchbeast.errors import UsageError

E = 3
MODES = list(AutoresetMode)


class Dicts(gymnasium.Env):  # type: ignore[type-arg]
    """Nested actions and observations; episodes of 1 to 5 steps end in either way, with an info."""

    observation_space = gymnasium.spaces.Dict(
        {
            "z": gymnasium.spaces.Box(-1.0, 9.0, (2,)),
            "a": gymnasium.spaces.Tuple(
                [gymnasium.spaces.Discrete(7), gymnasium.spaces.Box(0, 255, (2, 3), np.uint8)]
            ),
        }
    )
    action_space = gymnasium.spaces.Dict(
        {"move": gymnasium.spaces.Discrete(3), "force": gymnasium.spaces.Box(-0.5, 0.5, (2,))}
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time, self.length = 0, int(self.np_random.integers(1, 6))
        return self._seen(), {"first": 1}

    def step(self, action: Any) -> Any:
        assert np.abs(action["force"]).max() <= 0.5
        self.time += 1
        over = self.time == self.length
        info = {"length": self.time, "word": "x", "none": None} if over else {"length": -1}
        reward = float(action["move"] + action["force"].sum())
        return self._seen(), reward, over and self.length % 2 == 0, over, info

    def _seen(self) -> Any:
        picture = self.np_random.integers(0, 255, (2, 3)).astype(np.uint8)
        return {"z": np.full(2, self.time, np.float32), "a": (np.int64(self.time), picture)}


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=14)


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=4)


def assert_same(found: Any, expected: Any) -> None:
    pairs = list(zip(flatten(found), flatten(expected), strict=True))
    assert pairs
    for one, other in pairs:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def check_alike(make: Callable[[], Any], made: Any) -> None:
    check_same_steps(make, GymVectorEnv(made, "x"))


def check_same_steps(make: Callable[[], Any], theirs: GymVectorEnv, has_words: bool = True) -> None:
    """has_words: whether infos have entries that are not numbers."""
    ours = SyncVecEnv([make] * E, "x")
    random = np.random.default_rng(0)
    with closing(ours), closing(theirs):
        assert theirs.observation_space == ours.observation_space
        assert theirs.action_space == ours.action_space
        assert_same(theirs.reset(5), ours.reset(5))
        held, ends = [], 0
        for _ in range(40):
            action = random_action(ours.action_space, E, random)
            expected, found = ours.step(action), theirs.step(action)
            assert_same(found[:5], expected[:5])
            assert (found.final_observation is None) == (expected.final_observation is None)
            if expected.final_observation is not None:
                assert_same(found.final_observation, expected.final_observation)
                held.append((found.final_observation, expected.final_observation))
            held.append((found.observation, expected.observation))
            assert theirs.final_info.keys() == ours.final_info.keys()
            for index, info in ours.final_info.items():
                given = theirs.final_info[index]
                known = [key for key in info if has_words or isinstance(info[key], int)]
                assert {key: given[key] for key in known} == {key: info[key] for key in known}
                ends += 1
        assert ends > 4
        for found_one, expected_one in held:
            assert_same(found_one, expected_one)  # no later step has written to it


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [cartpole, pendulum, Dicts])
def test_a_sync_vector_env_gives_the_steps_of_its_environments(make: Any, mode: Any) -> None:
    check_alike(make, SyncVectorEnv([make] * E, autoreset_mode=mode, copy=False))


@pytest.mark.parametrize(("make", "mode"), list(zip([cartpole, pendulum, Dicts], MODES)))  # noqa: B905
def test_an_async_vector_env_does_too(make: Any, mode: Any) -> None:
    check_alike(make, AsyncVectorEnv([make] * E, autoreset_mode=mode, copy=False))


class Tensors:
    """A vector environment on a device, as ManiSkill and Isaac Lab have them."""

    def __init__(self, make: Callable[[], Any], gives_last: bool = True) -> None:
        self._env = SyncVectorEnv([make] * E, autoreset_mode=AutoresetMode.SAME_STEP)
        self.num_envs, self.unwrapped, self.device = E, self, torch.device("cpu")
        self.single_observation_space = self._env.single_observation_space
        self.single_action_space = self._env.single_action_space
        self._gives_last = gives_last

    def reset(self, *, seed: int) -> Any:
        return self._tensors(self._env.reset(seed=environment_seeds(5, E))[0]), {}

    def step(self, action: Any) -> Any:
        assert all(isinstance(leaf, torch.Tensor) for leaf in flatten(action))
        *found, infos = self._env.step(map_leaves(lambda leaf: leaf.numpy(), action))
        told = {}
        if "final_info" in infos and "length" in infos["final_info"]:
            told["length"] = torch.from_numpy(infos["final_info"]["length"])
        if self._gives_last:
            last = map_leaves(np.copy, found[0])
            for index in np.flatnonzero(infos.get("_final_obs", [])):
                for leaf, seen in zip(
                    flatten(last), flatten(infos["final_obs"][index]), strict=True
                ):
                    leaf[index] = seen
            told["final_observation"] = self._tensors(last)
        return *self._tensors(tuple(found)), told

    def close(self) -> None:
        self._env.close()

    @staticmethod
    def _tensors(arrays: Any) -> Any:
        return map_leaves(lambda leaf: torch.from_numpy(np.copy(leaf)), arrays)


@pytest.mark.parametrize("make", [cartpole, pendulum, Dicts])
def test_an_environment_of_tensors_gives_the_steps_of_its_environments(make: Any) -> None:
    check_same_steps(make, adopted(Tensors(make), "x"), has_words=False)


class Batches:
    """A vector environment in the mode SAME_STEP whose infos have another form than Gymnasium's."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(self, make: Callable[[], Any], name: str, form: str) -> None:
        self._env = Tensors(make)
        self.num_envs = E
        self.single_observation_space = self._env.single_observation_space
        self.single_action_space = self._env.single_action_space
        self._name, self._form = name, form

    def reset(self, *, seed: int) -> Any:
        return map_leaves(np.asarray, self._env.reset(seed=seed)[0]), {}

    def step(self, action: Any) -> Any:
        *found, infos = self._env.step(map_leaves(torch.from_numpy, action))
        told: dict[str, Any] = {self._name: map_leaves(np.asarray, infos["final_observation"])}
        if "length" in infos and self._form == "dicts":
            told["final_info"] = [{"length": int(length)} for length in infos["length"]]
        elif "length" in infos:
            told["final_info"] = {"length": infos["length"].numpy()}
        return *map_leaves(np.asarray, tuple(found)), told

    def close(self) -> None:
        self._env.close()


@pytest.mark.parametrize("make", [cartpole, pendulum, Dicts])
@pytest.mark.parametrize(
    ("name", "form"), [("final_obs", "arrays"), ("final_observation", "dicts")]
)
def test_last_observations_may_be_one_batch(make: Any, name: str, form: str) -> None:
    check_same_steps(make, GymVectorEnv(Batches(make, name, form), "x"), has_words=False)


class OfIsaacLab(gymnasium.Env):  # type: ignore[type-arg]
    """Has the attributes of Isaac Lab's environments: no vector environment of Gymnasium's classes,
    `device` is a text, the metadata have no autoreset mode, and infos no last observations.
    """

    metadata: ClassVar = {"render_modes": [None, "human", "rgb_array"]}
    is_vector_env = True

    def __init__(self) -> None:
        self._env = Tensors(pendulum, gives_last=False)
        self.num_envs, self.device = E, "cpu"
        one = self._env.single_observation_space
        self.single_observation_space = gymnasium.spaces.Dict({"policy": one})
        self.single_action_space = self._env.single_action_space
        self.observation_space = batch_space(one, E)
        self.action_space = batch_space(self.single_action_space, E)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        observation, _ = self._env.reset(seed=seed)
        return {"policy": observation}, {}

    def step(self, action: Any) -> Any:
        assert isinstance(action, torch.Tensor)
        observation, *rest, infos = self._env.step(action)
        log = {"log": {"Episode_Reward/x": torch.tensor(1.0)}, "indices": torch.arange(1)}
        return {"policy": observation}, *rest, {**infos, **log}


@pytest.mark.parametrize("wrap", [lambda env: env, gymnasium.wrappers.OrderEnforcing])
def test_isaac_labs_interface_gives_steps(wrap: Any) -> None:
    """gymnasium.make puts them in a wrapper, which lacks num_envs and the spaces of one."""
    env = vec_env_of(lambda num_envs: wrap(OfIsaacLab()), {}, E, "x")
    with closing(env), closing(SyncVecEnv([pendulum] * E, "x")) as ours:
        assert env.observation_space == {"policy": ours.observation_space}
        assert_same(env.reset(5), {"policy": ours.reset(5)})
        for time in range(1, 10):
            action = random_action(env.action_space, E, np.random.default_rng(0))
            found, expected = env.step(action), ours.step(action)
            assert_same(found.observation, {"policy": expected.observation})
            np.testing.assert_array_equal(found.reward, expected.reward)
            assert found.terminated.all() == (time % 4 == 0) and not found.truncated.any()


def test_the_name_of_a_device_alone_does_not_mean_tensors() -> None:
    made = SyncVectorEnv([cartpole] * E)
    made.device = "cpu"  # type: ignore[attr-defined]
    with closing(adopted(made, "x")) as env:
        env.reset(1)
        assert env.step(np.zeros(E, np.int64)).reward.tolist() == [1.0] * E


def test_time_limits_of_tensors_without_last_observations_are_terminations(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with closing(adopted(Tensors(pendulum, gives_last=False), "x")) as env:
        env.reset(1)
        steps = [env.step(np.zeros((E, 1), np.float32)) for _ in range(8)]
    assert [bool(step.terminated.all()) for step in steps] == [False, False, False, True] * 2
    assert not any(step.truncated.any() for step in steps)
    assert [record.message for record in caplog.records] == [
        "the infos of x lack the last observations of truncated episodes (final_obs), so its time "
        "limits count as terminations"
    ]


def test_an_environment_of_tensors_that_begins_episodes_late_is_refused() -> None:
    late = Tensors(cartpole)
    late.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="autoreset mode NextStep: use SameStep"):
        adopted(late, "x")


def test_a_wrapper_that_shows_one_environment_of_a_batch_is_a_single_environment() -> None:
    """ManiSkill's CPUGymWrapper is such a wrapper."""

    class One(gymnasium.Env):  # type: ignore[type-arg]
        single_observation_space = observation_space = cartpole().observation_space
        single_action_space = action_space = cartpole().action_space

    assert is_gym_vector(One())
    assert not is_gym_vector(gymnasium.Wrapper(One()))


def test_make_vec_is_an_env_fn_as_it_is() -> None:
    arguments = {"id": "CartPole-v1", "vectorization_mode": "sync", "max_episode_steps": 14}
    factory, _, _ = VecEnv.create_factory(
        env_fn=gymnasium.make_vec, env_kwargs=arguments, vec_env_size=2, info_keywords=["x"]
    )
    with closing(factory()) as env:
        assert isinstance(env, GymVectorEnv) and env.num_envs == 2
    spec = envs.EnvSpec("gymnasium:make_vec", arguments)
    with closing(envs.make(spec, E)) as env:
        assert env.num_envs == E and env.reset(1).shape == (E, 4)  # type: ignore[union-attr]


def fixed(**arguments: Any) -> Callable[..., Any]:
    return lambda num_envs: gymnasium.make_vec("CartPole-v1", num_envs=num_envs, **arguments)


def test_an_unknown_autoreset_mode_is_refused() -> None:
    older = SyncVectorEnv([cartpole])
    del older.metadata["autoreset_mode"]
    with pytest.raises(ValueError, match="no autoreset_mode of Gymnasium 1.1 or newer, got None"):
        vec_env_of(lambda num_envs: older, {}, 1, "x")


def steps_of(env: VecEnv, count: int) -> list[list[Any]]:
    """Returns what happened in each environment, with actions by the number of its steps."""
    random = np.random.default_rng(0)
    actions = flatten(random_action(env.action_space, E * count, random))
    observation = env.reset(5)
    taken = np.zeros(E, int)
    steps: list[list[Any]] = [[] for _ in range(E)]
    while taken.min() < count:
        chosen = [leaf[np.minimum(taken, count - 1) * E + range(E)] for leaf in actions]
        step = env.step(pack_as(env.action_space, chosen))
        finals = iter(range(E))
        for e in range(E):
            last = next(finals) if step.truncated[e] else None
            if step.resets is not None and step.resets[e]:
                assert step.reward[e] == 0 and step.terminated[e] and not step.episode_end[e]
                assert last is None and e not in env.final_info  # type: ignore[attr-defined]
                continue
            taken[e] += 1
            ended = step.terminated[e] or step.truncated[e]
            seen = [] if ended else [leaf[e] for leaf in flatten(step.observation)]
            if last is not None:
                seen = [leaf[last] for leaf in flatten(step.final_observation)]
            before = [leaf[e] for leaf in flatten(observation)]
            flags = [step.reward[e], step.terminated[e], step.truncated[e], step.episode_end[e]]
            steps[e].append([*before, *flags, *seen])
        observation = step.observation
    return [of_env[:count] for of_env in steps]


def test_wrappers_of_a_vector_environment_are_never_reset_in_part() -> None:
    made = SyncVectorEnv([cartpole] * E, autoreset_mode=AutoresetMode.NEXT_STEP)
    wrapped = NormalizeReward(NormalizeObservation(made))
    with closing(GymVectorEnv(wrapped, "x")) as env:
        env.reset(1)
        late = 0
        for _ in range(60):
            returns = wrapped.accumulated_reward.copy()
            step = env.step(np.zeros(E, np.int32))
            late += step.resets.sum()  # type: ignore[union-attr]
            goes_on = ~(step.terminated | step.truncated)
            assert (wrapped.accumulated_reward[goes_on] > returns[goes_on]).all()
        assert late > E


class Masked(gymnasium.Env):  # type: ignore[type-arg]
    """Its last observation forbids every action."""

    observation_space = gymnasium.spaces.Dict(
        {"action_mask": gymnasium.spaces.MultiBinary(2), "x": gymnasium.spaces.Box(0, 9, (1,))}
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self.time = 0
        return self._seen(), {}

    def step(self, action: int) -> Any:
        self.time += 1
        return self._seen(), 1.0, self.time == 3, False, {}

    def _seen(self) -> dict[str, np.ndarray]:
        mask = np.full(2, self.time < 3, np.int8)
        return {"action_mask": mask, "x": np.full(1, self.time, np.float32)}


def test_a_late_episode_allows_every_action_that_is_ignored() -> None:
    late = AsyncVectorEnv([Masked] * E, autoreset_mode=AutoresetMode.NEXT_STEP, shared_memory=False)
    with closing(GymVectorEnv(late, "x")) as env:
        env.reset(1)
        for _ in range(8):
            assert env.step(np.zeros(E, np.int32)).observation["action_mask"].all()


@pytest.mark.parametrize("make", [cartpole, pendulum, Dicts])
def test_episodes_that_begin_one_step_late_have_the_same_steps(make: Any) -> None:
    late = AsyncVectorEnv(
        [make] * E, autoreset_mode=AutoresetMode.NEXT_STEP, shared_memory=False, copy=False
    )
    with closing(SyncVecEnv([make] * E, "x")) as ours, closing(GymVectorEnv(late, "x")) as theirs:
        expected, found = steps_of(ours, 40), steps_of(theirs, 40)
    for one, other in zip(found, expected, strict=True):
        map_leaves2(np.testing.assert_array_equal, one, other)


def test_ales_own_vector_environment_has_the_same_steps_in_both_of_its_modes() -> None:
    """Its infos have last observations as one batch, and no final_info."""
    ale = pytest.importorskip("ale_py.vector_env")

    def pong(mode: AutoresetMode) -> GymVectorEnv:
        limit = {"max_num_frames_per_episode": 80, "img_height": 21, "img_width": 21}
        return GymVectorEnv(ale.AtariVectorEnv("pong", E, autoreset_mode=mode, **limit), "x")

    modes = AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP
    with closing(pong(modes[0])) as same, closing(pong(modes[1])) as late:
        found, expected = steps_of(same, 40), steps_of(late, 40)
    assert sum(step[3] for step in found[0]) > 1  # truncated
    for one, other in zip(found, expected, strict=True):
        map_leaves2(np.testing.assert_array_equal, one, other)


def test_gymnasiums_own_vector_version_of_an_environment_begins_late() -> None:
    with closing(vec_env_of(fixed(vectorization_mode="vector_entry_point"), {}, E, "x")) as env:
        env.reset(3)
        steps = [env.step(np.ones(E, np.int64)) for _ in range(30)]
    ends = np.array([step.episode_end for step in steps])
    resets = np.array([step.resets if step.resets is not None else [False] * E for step in steps])
    assert ends.any() and not resets[0].any()
    np.testing.assert_array_equal(resets[1:], ends[:-1])


class OfStableBaselines:
    """A VecEnv of Stable-Baselines3, as it describes the interface."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.envs = [make() for _ in range(E)]
        self.num_envs = E
        self.observation_space = self.envs[0].observation_space
        self.action_space = self.envs[0].action_space
        self.seeds: list[int | None] = [None] * E

    def seed(self, seed: int) -> None:
        self.seeds = list(range(seed, seed + E))

    def reset(self) -> Any:
        pairs = zip(self.envs, self.seeds, strict=True)
        return np.stack([env.reset(seed=seed)[0] for env, seed in pairs])

    def step_async(self, actions: Any) -> None:
        self.actions = actions

    def step_wait(self) -> Any:
        rows = [self._step(*pair) for pair in zip(self.envs, self.actions, strict=True)]
        observations, rewards, dones, infos = zip(*rows, strict=True)
        return np.stack(observations), np.array(rewards), np.array(dones), list(infos)

    def step(self, actions: Any) -> Any:
        self.step_async(actions)
        return self.step_wait()

    def _step(self, env: Any, action: Any) -> Any:
        observation, reward, terminated, truncated, info = env.step(action)
        info["TimeLimit.truncated"] = truncated and not terminated
        if terminated or truncated:
            info["terminal_observation"] = observation
            observation = env.reset()[0]
        return observation, reward, terminated or truncated, info

    def close(self) -> None: ...


@pytest.mark.parametrize("make", [cartpole, pendulum])
def test_a_vec_env_of_stable_baselines_gives_the_steps_of_its_environments(make: Any) -> None:
    """Its environments have seeds that follow each other, so that only one can be compared."""
    with closing(vec_env_of(lambda num_envs: OfStableBaselines(make), {}, E, "x")) as env:
        random = np.random.default_rng(0)
        observation = env.reset(4)
        alone = make()
        alone.reset(seed=environment_seeds(4, E)[0])
        cuts = 0
        for _ in range(30):
            action = random_action(env.action_space, E, random)
            step = env.step(action)
            seen, reward, terminated, truncated, _ = alone.step(np.asarray(action)[0])
            assert step.reward[0] == np.float32(reward)
            assert (step.terminated[0], step.truncated[0]) == (terminated, truncated)
            if truncated:
                np.testing.assert_array_equal(flatten(step.final_observation)[0][0], seen)
                assert 0 in env.final_info  # type: ignore[attr-defined]
                cuts += 1
            if terminated or truncated:
                seen, _ = alone.reset()
            np.testing.assert_array_equal(step.observation[0], seen)  # type: ignore[index]
        assert observation.shape[0] == E and (cuts or make is cartpole)  # type: ignore[union-attr]


def test_a_vector_environment_in_place_of_a_single_one_is_refused() -> None:
    with pytest.raises(ValueError, match="is a vector environment itself: add a parameter"):
        vec_env_of(lambda: SyncVectorEnv([cartpole]), {}, 1, "x")
    with pytest.raises(ValueError, match="called with num_envs=2, the factory must return"):
        vec_env_of(lambda num_envs: SyncVectorEnv([cartpole] * 3), {}, 2, "x")


def test_a_reward_that_is_not_finite_is_an_error() -> None:
    class Endless(gymnasium.RewardWrapper):  # type: ignore[type-arg]
        def reward(self, reward: Any) -> Any:
            return np.inf

    env = GymVectorEnv(SyncVectorEnv([cartpole, lambda: Endless(cartpole())]), "x")
    env.reset(0)
    with pytest.raises(ValueError, match="environment 1 of x: expected a finite reward, got inf"):
        env.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("make", "at"), [(cartpole, 3), (pendulum, 4)])
def test_an_observation_that_is_not_finite_is_an_error(make: Any, mode: Any, at: int) -> None:
    """Pendulum's step 4 is the last one of an episode that its time limit cuts."""

    class Diverging(gymnasium.ObservationWrapper):  # type: ignore[type-arg]
        time = -1

        def observation(self, observation: Any) -> Any:
            self.time += 1
            return observation + (np.nan if self.time == at else 0)

    env = GymVectorEnv(SyncVectorEnv([make, lambda: Diverging(make())], autoreset_mode=mode), "x")
    env.reset(0)
    action = random_action(env.action_space, 2, np.random.default_rng(0))
    message = f"^environment 1 of x, step {at} of the episode: expected finite float32 in the obs"
    with pytest.raises(ValueError, match=message):
        for _ in range(5):
            env.step(action)


class Shown(Dicts):
    """Draws itself."""

    metadata: ClassVar = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def render(self) -> Any:
        return np.full((2, 4, 3), 7, np.uint8)


@pytest.mark.parametrize(("make", "is_drawn"), [(Shown, True), (Dicts, False)])
def test_a_vector_environment_shows_its_first_environment(make: Any, is_drawn: bool) -> None:
    with closing(GymVectorEnv(SyncVectorEnv([make] * E), "x")) as env:
        env.reset(1)
        drawn = picture_of(env)
        assert (drawn is not None) == is_drawn
        assert drawn is None or drawn.shape == (2, 4, 3)


class ShownByBaselines(OfStableBaselines):
    render_mode = "rgb_array"

    def get_images(self) -> Any:
        return [env.render() for env in self.envs]


class ShownTensors(Tensors):
    render_mode = "rgb_array"

    def render(self) -> Any:
        return torch.full((E, 2, 4, 3), 7, dtype=torch.uint8)


@pytest.mark.parametrize("kind", [ShownByBaselines, ShownTensors])
def test_vector_environments_of_others_show_their_first_environment(kind: Any) -> None:
    with closing(vec_env_of(lambda num_envs: kind(Shown), {}, E, "x")) as env:
        drawn = picture_of(env)
        assert drawn is not None and drawn.shape == (2, 4, 3)


def test_a_result_of_another_shape_is_refused_by_its_name() -> None:
    class Column(gymnasium.vector.VectorWrapper):  # type: ignore[type-arg]
        def step(self, actions: Any) -> Any:
            observation, reward, *rest = self.env.step(actions)
            return observation, reward[:, None], *rest

    with closing(GymVectorEnv(Column(SyncVectorEnv([cartpole] * E)), "x")) as env:
        env.reset(0)
        with pytest.raises(ValueError, match=r"^x: step returned reward of shape \(3, 1\), exp"):
            env.step(np.zeros(E, np.int64))
