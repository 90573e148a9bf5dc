# SPDX-License-Identifier: Apache-2.0
"""Each agent of a game is a column, whose rows are what the agent saw, did and got."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from agent_games import Turns, Visits
from compliance.vec_env import VecEnvCompliance
from gymnasium import spaces

from torchbeast import Learner, UsageError, make_env
from torchbeast.core.actors import OnPolicyActorCritic
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos import PPO
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs import VecEnv
from torchbeast.core.envs.agents import AgentsEnv
from torchbeast.core.envs.vec_env import vec_env_of
from torchbeast.core.storages import OnPolicyGAEBuffer
from torchbeast.envs import EnvError, EnvOptions, EnvSpec
from torchbeast.run import episodes
from torchbeast.run.episodes import play
from torchbeast.schemes import Scheme


def visits(num_envs: int) -> tuple[AgentsEnv, list[Visits]]:
    games: list[Visits] = []

    def make() -> Visits:
        games.append(Visits())
        return games[-1]

    env = vec_env_of(make, {}, num_envs, "Visits")
    assert isinstance(env, AgentsEnv)
    return env, games


class TestGames(VecEnvCompliance):
    num_steps = 40

    def make(self, num_envs: int) -> VecEnv:
        class TwoAgents(Visits):
            """Agents a and b; every game has other observations."""

            possible_agents: ClassVar = ["a", "b"]
            present = ("ab", "ab", "ab", "ab", "b", "b")
            terminated, truncated = ((3, "a"),), ((5, "b"),)

            def reset(self, seed: int | None = None, options: Any = None) -> Any:
                if seed is not None:
                    self.rng = np.random.default_rng(seed)
                self.offset = self.rng.normal()
                return super().reset(seed)

            def _seen(self, name: str, action: int) -> Any:
                return super()._seen(name, action) + np.float32(self.offset)

        return vec_env_of(TwoAgents, {}, num_envs, "TwoAgents")


# step:  0 (reset)  1      2       3       4      5, where the game ends and the next one begins
A = [[0, 0, -1], [0, 1, 1], [0, 2, 1], [0, 0, 0], [0, 0, 0], [0, 0, -1]]
B = [[1, 0, -1], [1, 1, 2], [1, 2, 2], [1, 3, 2], [1, 4, 2], [1, 0, -1]]
C = [[0, 0, 0], [0, 0, 0], [2, 2, -1], [2, 3, 3], [2, 4, 3], [0, 0, 0]]
IDLE = [[0, 0, 0]] * 6


def test_agents_that_come_and_go_have_the_rows_of_their_own_episodes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env, _ = visits(4)
    seen = [env.reset(0)]
    assert "1 of the 4 environments of a process stay idle" in caplog.text
    steps = [env.step(np.array([1, 2, 3, 0])) for _ in range(5)]
    seen += [step.observation for step in steps]
    expected = np.array([A, B, C, IDLE], np.float32).swapaxes(0, 1)
    np.testing.assert_array_equal(np.stack(seen), expected)
    resets = [np.zeros(4, bool) if step.resets is None else step.resets for step in steps]
    by_step = {
        "reward": [step.reward.tolist() for step in steps],
        "terminated": [step.terminated.tolist() for step in steps],
        "truncated": [step.truncated.tolist() for step in steps],
        "episode_end": [step.episode_end.tolist() for step in steps],
        "resets": [found.tolist() for found in resets],
    }
    x, _ = True, False
    assert by_step == {
        "reward": [[1, 2, 0, 0], [1, 2, 0, 0], [1, 2, 3, 0], [0, 2, 3, 0], [0, 2, 3, 0]],
        "terminated": [[_, _, x, x], [_, _, x, x], [x, _, _, x], [x, _, _, x], [x, _, x, x]],
        "truncated": [[_, _, _, _]] * 4 + [[_, x, _, _]],
        "episode_end": [[_, _, _, _]] * 2 + [[x, _, _, _], [_, _, _, _], [_, x, x, _]],
        "resets": [[_, _, x, x], [_, _, x, x], [_, _, _, x], [x, _, _, x], [x, _, _, x]],
    }
    np.testing.assert_array_equal(steps[4].final_observation, [[1, 5, 2]])
    assert env.final_info == {1: {"time": 5}, 2: {"time": 5}}


def test_each_game_has_a_seed_of_its_own_and_goes_on_without_one() -> None:
    env, games = visits(6)
    env.reset(3)
    for _ in range(5):
        env.step(np.ones(6, np.int64))
    first, second = (game.seeds for game in games)
    assert first[0] != second[0] and first[1:] == second[1:] == [None]
    env.close()
    assert all(game.was_closed for game in games)


def test_agents_wait_for_their_turn_with_a_mask_of_one_action() -> None:
    games: list[Turns] = []

    def make() -> Turns:
        games.append(Turns())
        return games[-1]

    env = vec_env_of(make, {}, 2, "Turns")
    observation: Any = env.reset(0)
    waits, plays = [1, 0, 0], [0, 1, 1]
    for turn, masks in enumerate([[plays, waits], [waits, plays], [plays, waits]]):
        assert observation["action_mask"].tolist() == masks
        step = env.step(np.array([2 if mask == plays else 0 for mask in masks]))
        observation = step.observation
        assert step.terminated.all() == (turn == 2)
    assert step.reward.tolist() == [1, -1] and not np.any(step.resets)
    assert observation["sum"].tolist() == [[0], [0]], "the next game has begun"
    assert games[0].taken == [("first", 2), ("second", 2), ("first", 2)]


def test_too_few_environments_for_a_game_are_refused_when_it_begins() -> None:
    env, _ = visits(2)
    with pytest.raises(
        UsageError,
        match="has 3 agents, .* got 2 environments: .* a multiple of 3, .* num_envs 12 with",
    ):
        env.reset(0)


class Different(Visits):
    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4 + (agent == "c"))


class TurnsWithoutMask(Turns):
    def observation_space(self, agent: str) -> Any:
        return spaces.Box(0, 10, (1,), np.float32)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Different, r"equal spaces, but the action space of a is Discrete\(4\), and c has"),
        (TurnsWithoutMask, "a game of turns needs Discrete actions and .* action_mask"),
    ],
)
def test_a_game_that_one_policy_cannot_play_is_refused(kind: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        vec_env_of(kind, {}, 3, "Game")


class Broken(Visits):
    def __init__(self, reward: float = 1.0, seen: float = 0.0) -> None:
        super().__init__()
        self._reward, self._number = reward, seen

    def step(self, actions: dict[str, Any]) -> Any:
        seen, rewards, *rest = super().step(actions)
        rewards["b"], seen["b"][1] = self._reward, self._number
        return seen, rewards, *rest


@pytest.mark.parametrize("kwargs", [{"reward": float("nan")}, {"seen": float("inf")}])
def test_a_number_that_is_not_finite_names_agent_game_and_step(kwargs: dict[str, float]) -> None:
    env = vec_env_of(Broken, kwargs, 3, "Broken")
    env.reset(0)
    with pytest.raises(ValueError, match="agent b of game 0 of Broken, step 1: expected"):
        env.step(np.zeros(3, np.int64))


def test_one_policy_learns_from_the_steps_of_agents_that_were_there(tmp_path: Path) -> None:
    """Of 5 steps of a game, agent a takes 3, b 5 and c 3."""
    envs, action_space, space = VecEnv.create_factory(env_fn=Visits, vec_env_size=4)
    scheme = Scheme(
        train_envs_factory=envs,
        algo_factory=PPO.create_factory(num_epochs=1, num_mini_batch=1),
        actor_factory=OnPolicyActorCritic.create_factory(space, action_space),
        storage_factory=OnPolicyGAEBuffer.create_factory(size=10),
    )
    with Learner(scheme, 200, tmp_path / "run", seed=1) as learner:
        assert learner.step()["step"] == 2 * (3 + 5 + 3)
        learner.train()
        assert learner.get_metrics()["mean_length"] == pytest.approx(11 / 3, abs=0.2)
        played = learner.evaluate(4)
    assert sorted(set(played.lengths)) == [3, 5]


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("pettingzoo:simple_spread_v3", "add the family, as in pettingzoo:mpe/simple_spread"),
        ("pettingzoo:clasic/rps_v2", "no clasic; did you mean classic"),
        ("pettingzoo:classic/connect_for_v3", "no connect_for_v3; did you mean connect_four_v3"),
    ],
)
def test_an_unknown_name_is_refused_with_near_ones(env_id: str, message: str) -> None:
    pytest.importorskip("pettingzoo")
    with pytest.raises(EnvError, match=message):
        make_env(env_id, 2)


def test_a_missing_package_is_named() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torchbeast.envs.spec.find_spec", lambda name: None)
        with pytest.raises(EnvError, match="needs mpe2, .*: pip install 'torchbeast"):
            make_env("pettingzoo:mpe/simple_spread_v3", 3)


def test_observation_keys_which_every_run_records_are_taken() -> None:
    pytest.importorskip("pettingzoo")
    spec = EnvSpec("pettingzoo:classic/connect_four_v3")
    for keys in (("action_mask", "observation"), ("action_mask",)):
        options = EnvOptions(observation_keys=keys)
        env = make_env(dataclasses.replace(spec, options=options), 2)
        assert set(env.reset(1)) == set(keys)


def test_an_evaluation_does_not_wait_for_idle_columns() -> None:
    env, _ = visits(4)  # three agents
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, env.frame_stack)
    assert len(play(env, agent, 8, seed=0).returns) == 8


def test_an_evaluation_does_not_wait_for_an_agent_that_never_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(episodes, "_MOST_IDLE_STEPS", 50)
    monkeypatch.setattr(Visits, "present", ("ab", "ab", "ab", "ab", "b", "b"))
    env, _ = visits(3)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, env.frame_stack)
    assert len(play(env, agent, 6, seed=0).returns) == 4


@pytest.mark.parametrize(
    ("env_id", "num_agents"),
    [
        ("pettingzoo:mpe/simple_spread_v3", 3),  # parallel
        ("pettingzoo:classic/connect_four_v3", 2),  # turns
        ("pettingzoo:classic/rps_v2", 2),  # turns that PettingZoo makes parallel
    ],
)
def test_environments_of_pettingzoo_play_whole_games(env_id: str, num_agents: int) -> None:
    pytest.importorskip("mpe2" if "mpe" in env_id else "pettingzoo")
    try:
        env = make_env(env_id, 2 * num_agents)
    except EnvError as error:
        pytest.skip(str(error))
    observation: Any = env.reset(1)
    ended = 0
    for _ in range(200):
        masks = observation["action_mask"] if isinstance(observation, dict) else None
        action = np.zeros(2 * num_agents, np.int64) if masks is None else masks.argmax(-1)
        step = env.step(action)
        observation, ended = step.observation, ended + int(step.episode_end.sum())
        assert not np.any(step.resets)
    env.close()
    assert ended and ended % num_agents == 0


def test_masks_in_the_infos_of_several_agents_are_refused() -> None:
    spec = EnvSpec("agent_games:Visits", options=EnvOptions(mask_actions=True))
    with pytest.raises(EnvError, match="Visits is a game of several: add an action_mask to its"):
        make_env(spec, 3)
