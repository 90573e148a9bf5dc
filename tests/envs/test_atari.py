# SPDX-License-Identifier: Apache-2.0
"""Atari against the original's Python wrappers, action by action; see docs/how-to/atari.md."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import ale_py
import gymnasium
import numpy as np
import pytest
from atari_reference import (
    FIRE,
    EpisodicLife,
    FireReset,
    Game,
    MaxAndSkip,
    WarpAndStack,
    begin_like_ale,
    to_gray,
    warp,
)
from later import later

from torchbeast import envs
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.frame_stack import FrameStacker
from torchbeast.core.envs.spaces import Discrete
from torchbeast.core.envs.sync_vec_env import environment_seeds
from torchbeast.envs.atari import AtariEnv

GAMES = ["pong", "breakout"]


class Ours:
    """A game through AtariEnv and FrameStacker, as the policy sees it, without no-ops."""

    def __init__(self, rom: str) -> None:
        self.env = AtariEnv(rom, 1, noop_max=0)
        self.stacker = FrameStacker(self.env.frame_stack)

    def reset(self) -> np.ndarray:
        return self.stacker.reset(self.env.reset(0))[0]

    def step(self, action: int) -> tuple[np.ndarray, VecStep]:
        step = self.env.step(np.array([action]))
        stack = self.stacker.push(step.observation, step.terminated | step.truncated)
        return stack[0], step


def wrapped(rom: str, *, gray: bool) -> WarpAndStack:
    """The original's wrappers around a game with the same start."""
    episodes = EpisodicLife(MaxAndSkip(Game(rom, gray=gray), begin_like_ale(noops=0)))
    return WarpAndStack(FireReset(episodes))


class Compared(NamedTuple):
    ours: np.ndarray  # uint8 [4, 84, 84]
    theirs: np.ndarray
    age: int  # actions since the episode began


def played(rom: str, *, gray: bool, num_steps: int) -> Iterator[Compared]:
    """Plays both alike and yields what the policy sees, before each action.

    After a reset the wrappers press buttons by themselves: a no-op when only a life was lost, then
    FIRE and action 2. Here the same is played by hand on our side, so that both stay in step.
    """
    ours, theirs = Ours(rom), wrapped(rom, gray=gray)
    hidden = [FIRE, 2]
    ours.reset()
    rng = np.random.default_rng(0)
    their_stack, age = theirs.reset(), 0
    stack = [ours.step(action)[0] for action in hidden][-1]
    for _ in range(num_steps):
        yield Compared(stack, their_stack, age)
        action = int(rng.integers(ours.env.action_space.n))
        stack, step = ours.step(action)
        their_stack, reward, done = theirs.step(action)
        age += 1
        assert step.reward[0] == reward and step.terminated[0] == done
        if done:
            hidden = [FIRE, 2] if step.episode_end[0] else [0, FIRE, 2]
            their_stack, age = theirs.reset(), 0
            stack = [ours.step(action)[0] for action in hidden][-1]


@pytest.mark.parametrize(("rom", "num_steps"), [later("pong", 1100), ("breakout", 400)])
def test_frames_rewards_and_ends_equal_the_wrappers_exactly(rom: str, num_steps: int) -> None:
    """The maximum is taken over gray values; stacks agree from the fourth frame on."""
    begun = 0
    for ours, theirs, age in played(rom, gray=True, num_steps=num_steps):
        newest = min(age + 1, 4)
        np.testing.assert_array_equal(ours[-newest:], theirs[-newest:])
        begun += age == 0
    assert begun > 1, "nothing ended: play on"


@pytest.mark.parametrize("rom", GAMES)
def test_the_maximum_over_colours_differs_in_few_pixels(rom: str) -> None:
    different = [
        np.mean(ours[-1] != theirs[-1])
        for ours, theirs, _ in played(rom, gray=False, num_steps=300)
    ]
    assert np.mean(different) < 1e-4


STICKY, SEED = 0.25, 11


def frames_of_ours(rom: str, actions: list[int], **options: Any) -> list[np.ndarray]:
    env = AtariEnv(rom, 1, noop_max=0, **options)
    env.reset(SEED)
    return [env.step(np.array([action])).observation[0, 0] for action in actions]


def frames_of_the_wrappers(
    rom: str, actions: list[int], *, skip: int = 4, **options: Any
) -> list[np.ndarray]:
    (seed,) = environment_seeds(SEED, 1)
    env = MaxAndSkip(Game(rom, gray=True, seed=seed, **options), begin_like_ale(0), skip)
    env.reset()
    return [warp(env.step(action)[0]) for action in actions]


def random_actions(count: int, num_steps: int = 60) -> list[int]:
    return np.random.default_rng(1).integers(count, size=num_steps).tolist()


@pytest.mark.parametrize("sticky", [0.0, STICKY])
def test_actions_stick_with_the_given_probability(sticky: float) -> None:
    """ALE draws from the environment's seed: the same seed repeats the same frames."""
    actions = random_actions(6)
    ours = frames_of_ours("pong", actions, sticky_actions=sticky)
    np.testing.assert_array_equal(ours, frames_of_the_wrappers("pong", actions, sticky=sticky))
    other = frames_of_the_wrappers("pong", actions, sticky=STICKY - sticky)
    assert any((a != b).any() for a, b in zip(ours, other, strict=True))


@pytest.mark.parametrize(
    ("env_id", "sticky"),
    [
        ("ALE/Breakout-v5", 0.25),
        ("BreakoutNoFrameskip-v4", 0.0),
        later("Breakout-v4", 0.0),
        later("Breakout-v0", 0.25),
        later("BreakoutNoFrameskip-v0", 0.25),
    ],
)
def test_an_id_has_the_sticky_actions_that_gymnasium_registers_with_it(
    env_id: str, sticky: float
) -> None:
    gymnasium.register_envs(ale_py)
    registered = gymnasium.spec(env_id).kwargs["repeat_action_probability"]
    assert registered == sticky, "what the test expects"
    actions = random_actions(4)
    frames = {}
    for name, env in {
        "made": envs.make(env_id, 1),
        "sticks": AtariEnv("breakout", 1, sticky_actions=sticky),
        "other": AtariEnv("breakout", 1, sticky_actions=STICKY - sticky),
    }.items():
        env.reset(SEED)
        frames[name] = np.stack([env.step(np.array([a])).observation for a in actions])
    np.testing.assert_array_equal(frames["made"], frames["sticks"])
    assert (frames["made"] != frames["other"]).any()


def test_options_override_the_settings_of_the_id() -> None:
    chosen: dict[str, Any] = {"sticky_actions": 0.5, "frame_skip": 3, "full_action_space": True}
    actions, frames = random_actions(18), []
    for env in (
        envs.make(envs.EnvSpec("ALE/Pong-v5", options=envs.EnvOptions(**chosen)), 1),
        AtariEnv("pong", 1, **chosen),
    ):
        env.reset(SEED)
        frames.append(np.stack([env.step(np.array([a])).observation for a in actions]))
    np.testing.assert_array_equal(*frames)


@pytest.mark.parametrize("skip", [1, later(2), 3, later(5)])
def test_frame_skip_frames_are_emulated_for_each_action(skip: int) -> None:
    actions = random_actions(4)
    ours = frames_of_ours("breakout", actions, frame_skip=skip)
    np.testing.assert_array_equal(ours, frames_of_the_wrappers("breakout", actions, skip=skip))


def test_the_full_action_space_has_all_actions_of_the_console() -> None:
    actions = random_actions(18)
    ours = frames_of_ours("breakout", actions, full_action_space=True)
    theirs = frames_of_the_wrappers("breakout", actions, every_action=True)
    np.testing.assert_array_equal(ours, theirs)
    assert AtariEnv("breakout", 1, full_action_space=True).action_space == Discrete(18)
    assert AtariEnv("breakout", 1).action_space == Discrete(4)


@pytest.mark.parametrize("rom", GAMES)
def test_gray_values_equal_those_of_the_wrappers(rom: str) -> None:
    game = Game(rom)
    for _ in range(20):
        game.act(FIRE)
    np.testing.assert_array_equal(to_gray(game.screen()), game.ale.getScreenGrayscale())


def test_a_game_begins_with_fewer_than_thirty_no_ops() -> None:
    """In Breakout every number of no-ops gives another picture; FIRE counts as one."""
    game = Game("breakout", gray=True)
    game.ale.reset_game()
    game.act(FIRE)
    pictures = []
    for _ in range(29):
        pictures.append(warp(game.screen()).tobytes())
        game.act(0)
    assert len(set(pictures)) == 29
    env = AtariEnv("breakout", 4)
    begun = [frame.tobytes() for seed in (0, 1) for frame in env.reset(seed)]
    assert set(begun) <= set(pictures) and len(set(begun)) > 3


def test_a_lost_life_ends_the_episode_for_learning_and_the_game_goes_on() -> None:
    env = AtariEnv("breakout", 1)
    env.reset(0)
    ends = _ends(env, num_steps=450)
    losses = [step.episode_end[0] for step in ends]
    assert losses[:10] == [False, False, False, False, True] * 2
    assert all(step.final_observation is None for step in ends)


def test_a_game_without_lives_ends_once() -> None:
    env = AtariEnv("pong", 1)
    env.reset(0)
    reward = 0.0
    while not (step := env.step(np.array([0]))).terminated[0]:
        reward += float(step.reward[0])
    assert step.episode_end[0] and reward + step.reward[0] == -21


def test_rewards_are_not_clipped() -> None:
    env = AtariEnv("space_invaders", 2)
    env.reset(0)
    rng = np.random.default_rng(0)
    assert max(env.step(rng.integers(6, size=2)).reward.max() for _ in range(150)) > 1


def test_a_time_limit_truncates_and_a_new_game_begins() -> None:
    env = AtariEnv("breakout", 2, max_frames=40, noop_max=0)
    first = env.reset(0)
    steps = [env.step(np.zeros(2, np.int64)) for _ in range(20)]
    assert [step.truncated.all() for step in steps] == ([False] * 9 + [True]) * 2
    for step in (steps[9], steps[19]):
        assert step.episode_end.all() and not step.terminated.any()
        np.testing.assert_array_equal(step.observation, first)
        assert (step.final_observation != first).any()


def test_the_final_frame_of_a_truncated_episode_is_the_third_of_its_step() -> None:
    """ALE stops before the fourth frame; docs/how-to/atari.md says why that is accepted."""
    env = AtariEnv("pong", 1, max_frames=40, noop_max=0)
    env.reset(0)
    game = Game("pong", gray=True)
    reference = MaxAndSkip(game, begin_like_ale(noops=0))
    reference.reset()
    for _ in range(9):
        pooled, _, _ = reference.step(2)
        env.step(np.array([2]))
    for _ in range(3):
        game.act(2)
    final = env.step(np.array([2])).final_observation
    np.testing.assert_array_equal(final[0, 0], warp(np.maximum(pooled, game.screen())))


def test_a_life_lost_in_the_last_step_before_a_time_limit_ends_the_game() -> None:
    """The ball of Breakout is lost at a known step if FIRE is not pressed again."""
    env = AtariEnv("breakout", 1, noop_max=0)
    env.reset(0)
    lost_after = next(i for i in range(1, 200) if env.step(np.array([0])).terminated[0])
    cut = AtariEnv("breakout", 1, noop_max=0, max_frames=4 * lost_after)
    cut.reset(0)
    step = [cut.step(np.array([0])) for _ in range(lost_after)][-1]
    assert step.terminated[0] and step.episode_end[0] and not step.truncated[0]


def test_the_number_of_threads_changes_nothing() -> None:
    plays = []
    for num_threads in (1, 2):
        env = AtariEnv("breakout", 2, num_threads=num_threads)
        env.reset(4)
        plays.append([env.step(np.full(2, FIRE)).observation for _ in range(40)])
    np.testing.assert_array_equal(*plays)


def test_an_unknown_action_is_refused_at_once() -> None:
    env = AtariEnv("breakout", 2)
    env.reset(0)
    with pytest.raises(ValueError, match=r"between 0 and 3, got \[0, 4\]"):
        env.step(np.array([0, 4]))
    assert env.step(np.array([0, 3])).reward.shape == (2,)


def _ends(env: AtariEnv, num_steps: int) -> list[VecStep]:
    rng = np.random.default_rng(0)
    steps = (env.step(rng.integers(env.action_space.n, size=1)) for _ in range(num_steps))
    return [step for step in steps if step.terminated[0]]


def test_a_game_lasts_at_most_the_30_minutes_of_the_literature() -> None:
    """Machado et al. 2018: 30 minutes of 60 frames a second."""
    assert inspect.signature(AtariEnv).parameters["max_frames"].default == 30 * 60 * 60
