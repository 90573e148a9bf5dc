# SPDX-License-Identifier: Apache-2.0
"""In self-play one agent of each game learns, and versions of it play the others."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from agent_games import Turns, Visits
from compliance.vec_env import VecEnvCompliance
from torch import nn

from torchbeast import ActorCritic, Learner, ModelOutput, RunError, Scheme, UsageError, make_env
from torchbeast.core.actors import self_play
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.actors.self_play import SelfPlay, as_version, version_path
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs import VecEnv
from torchbeast.core.envs.vec_env import vec_env_of
from torchbeast.core.storages import OnPolicyGAEBuffer
from torchbeast.envs import EnvOptions, EnvSpec
from torchbeast.run.checkpoint_writer import PastVersions


class TwoAgents(Visits):
    """Agents a and b; a ends before b, who is cut off."""

    possible_agents: ClassVar = ["a", "b"]
    present = ("ab", "ab", "ab", "ab", "b", "b")
    terminated, truncated = ((3, "a"),), ((5, "b"),)


class TestSelfPlay(VecEnvCompliance):
    num_steps = 40

    def make(self, num_envs: int) -> VecEnv:
        return SelfPlay(vec_env_of(TwoAgents, {}, 1, "TwoAgents"), num_envs, "no versions")


def games_of_turns(num_envs: int, pool: Path) -> tuple[SelfPlay, list[Turns]]:
    games: list[Turns] = []

    def make_game() -> Turns:
        games.append(Turns())
        return games[-1]

    return SelfPlay(vec_env_of(make_game, {}, 1, "Turns"), num_envs, str(pool)), games


def whole_games(taken: list[tuple[str, int | None]]) -> list[dict[str, list[int]]]:
    """Returns what each agent did in the games that ended; the agent who reaches 5 ends one."""
    games: list[dict[str, list[int]]] = [{"first": [], "second": []}]
    for name, action in taken:
        if action is None:
            continue
        games[-1][name].append(action)
        if sum(map(sum, games[-1].values())) >= 5:
            games.append({"first": [], "second": []})
    return games[:-1]


def test_one_agent_of_each_game_acts_as_it_is_told_and_gets_its_own_rewards(tmp_path: Path) -> None:
    torch.manual_seed(1)
    env, (game,) = games_of_turns(1, tmp_path)
    env.reset(3)
    results = []
    for _ in range(400):
        step = env.step(np.array([2]))  # an agent that waits is told too, and does nothing
        results += [float(step.reward[0])] if step.episode_end[0] else []
    learners = []
    for played, result in zip(whole_games(game.taken), results, strict=True):
        won = "first" if len(played["first"]) > len(played["second"]) else "second"
        learns = won if result == 1 else {"first": "second", "second": "first"}[won]
        learners.append(learns)
        assert set(played[learns]) <= {2}
    others = [
        action
        for played, learns in zip(whole_games(game.taken), learners, strict=True)
        for name, actions in played.items()
        if name != learns
        for action in actions
    ]
    assert 0.3 < learners.count("first") / len(learners) < 0.7
    assert 0.35 < others.count(1) / len(others) < 0.65  # the random player


def test_the_last_observation_is_the_one_of_the_agent_that_learns() -> None:
    env = SelfPlay(vec_env_of(TwoAgents, {}, 1, "TwoAgents"), 8, "no versions")
    learns = env.reset(0)[:, 0]  # 0 is a, 1 is b
    for _ in range(5):
        step = env.step(np.arange(8) % 4)
    assert set(learns) == {0, 1}
    np.testing.assert_array_equal(step.truncated, learns == 1)
    final = np.array([[1, 5, column % 4] for column in range(8) if learns[column]], np.float32)
    np.testing.assert_array_equal(step.final_observation, final)
    assert step.resets is not None  # the agents a, which had ended before the game
    np.testing.assert_array_equal(step.resets, learns == 0)


class Always(ActorCritic):
    """Takes one action always."""

    def __init__(self, observation_space: Any, action_space: Any, use_lstm: bool, action: int = 1):
        super().__init__()
        self.logits = nn.Parameter(30.0 * torch.eye(action_space.n)[action])

    def forward(self, inputs: Any, core_state: Any) -> ModelOutput:
        logits = self.logits.expand(*inputs.reward.shape, -1)
        return ModelOutput(logits, torch.zeros_like(inputs.reward), core_state)


class Remembers(Always):
    """Counts the steps of its games, and fails unless that is the number that it sees."""

    calls: ClassVar[int] = 0

    def initial_state(self, batch_size: int) -> Any:
        return torch.zeros(1, batch_size, 1)

    def forward(self, inputs: Any, core_state: Any) -> ModelOutput:
        steps = torch.where(inputs.done[0, :, None], 0.0, core_state)
        np.testing.assert_array_equal(steps[0, :, 0], inputs.observation[0, :, 1])
        Remembers.calls += 1
        return super().forward(inputs, steps + 1)


def write_version(
    pool: Path, step: int, env: VecEnv, model: str = "Always", action: int = 1, elo: float = 0.0
) -> None:
    spec = ActorSpec(f"{__name__}:{model}", {"action": action})
    agent = make_agent(spec, env.observation_space, env.action_space, 1)
    torch.save(as_version(agent, elo), version_path(pool, step))


@pytest.mark.parametrize("seed", range(4))  # whose game is the first to end
def test_the_newest_version_plays_the_games_that_begin_after_it_was_written(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_play, "_RANDOM", 0.0)
    monkeypatch.setattr(self_play, "_NEWEST", 1.0)
    env, games = games_of_turns(32, tmp_path)
    write_version(tmp_path, 100, env, action=1)
    env.reset(seed)
    write_version(tmp_path, 200, env, action=2)
    for _ in range(12):
        env.step(np.full(32, 2))
    for game in games:  # the learning agent always takes 2; some games end before others
        first, second, *_ = whole_games(game.taken)
        assert sorted(map(set, first.values()), key=sum) == [{1}, {2}]
        assert [set(actions) for actions in second.values()] == [{2}, {2}]


def test_the_rating_follows_elos_formula(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_play, "_RANDOM", 0.0)
    monkeypatch.setattr(self_play, "_NEWEST", 1.0)
    env, _ = games_of_turns(1, tmp_path)
    write_version(tmp_path, 100, env, action=1, elo=120.0)
    env.reset(0)
    rating, rated = 120.0, []
    for action in np.random.default_rng(1).integers(1, 3, 300):
        step = env.step(np.array([action]))
        if step.episode_end[0]:
            score = {1: 1.0, -1: 0.0}[int(step.reward[0])]
            rating += 16 * (score - 1 / (1 + math.pow(10, (120.0 - rating) / 400)))
            rated.append((env.final_info[0]["elo"], rating))
    found, expected = zip(*rated, strict=True)
    np.testing.assert_allclose(found, expected)
    assert min(np.diff(expected)) < 0 < max(np.diff(expected))


def test_a_game_is_rated_when_it_is_over_for_all_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_play, "_RANDOM", 0.0)
    env = SelfPlay(vec_env_of(TwoAgents, {}, 1, "TwoAgents"), 1, str(tmp_path))
    write_version(tmp_path, 100, env, action=1)
    seed = next(seed for seed in range(20) if env.reset(seed)[0, 0] == 0)  # a learns
    env.reset(seed)
    ratings = []
    for _ in range(5):
        env.step(np.array([1]))
        ratings.append(env.elo)
    assert ratings == [0, 0, 0, 0, -8]  # 3 : 3 when a ends, 3 : 5 when the game is over


def test_a_version_remembers_from_the_first_row_of_its_games(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_play, "_RANDOM", 0.0)
    monkeypatch.setattr(self_play, "_NEWEST", 1.0)
    monkeypatch.setattr(Remembers, "calls", 0)
    env = SelfPlay(vec_env_of(TwoAgents, {}, 1, "TwoAgents"), 1, str(tmp_path))
    write_version(tmp_path, 100, env, "Remembers")
    env.reset(0)
    for _ in range(60):  # twelve games: the version is read again before the ninth
        env.step(np.array([0]))
    assert Remembers.calls >= 50


def test_a_version_of_another_agent_is_refused(tmp_path: Path) -> None:
    env, _ = games_of_turns(1, tmp_path)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1)
    version = as_version(agent, 0.0)
    version["weights"] = {"weight": torch.zeros(3)}
    torch.save(version, version_path(tmp_path, 100))
    with pytest.raises(UsageError, match="use a new selfplay folder for each run"):
        env.reset(0)


@pytest.mark.parametrize(
    ("env_id", "options", "message"),
    [
        ("CartPole-v1", {}, "selfplay needs a game of several agents, and CartPole-v1 is not one"),
        ("agent_games:Turns", {"observation_keys": ("sum",)}, "does not take observation_keys"),
    ],
)
def test_self_play_where_it_cannot_be_is_refused(
    env_id: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spec = EnvSpec(env_id, options=EnvOptions(selfplay=str(tmp_path), **options))
    with pytest.raises(UsageError, match=message):
        make_env(spec, 2)


def test_versions_are_written_at_multiples_of_steps_with_the_last_rating(tmp_path: Path) -> None:
    env, _ = games_of_turns(1, tmp_path)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1)
    write_version(tmp_path, 1000, env)
    versions = PastVersions(tmp_path, agent, every=100, step=1030)
    for step in range(1040, 1400, 40):
        versions(step, {"info_elo": float(step) if step % 80 else math.nan})
    written = {path.name: torch.load(path)["elo"] for path in tmp_path.iterdir()}
    assert written == {
        "000000001000.version": 0.0,
        "000000001120.version": 1080.0,
        "000000001200.version": 1160.0,
        "000000001320.version": 1320.0,
    }


def test_a_run_whose_versions_are_elsewhere_is_refused(tmp_path: Path) -> None:
    env, _ = games_of_turns(1, tmp_path)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1)
    PastVersions(tmp_path / "new", agent, every=100, step=90)
    with pytest.raises(UsageError, match="new does not contain a version of .* at step 1,030"):
        PastVersions(tmp_path / "new", agent, every=100, step=1030)


@pytest.mark.long
def test_a_learner_writes_versions_that_its_games_are_played_against(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    spec = EnvSpec("agent_games:Turns", options=EnvOptions(selfplay=str(pool)))
    envs, _, _ = VecEnv.create_factory(env_fn=make_env, env_kwargs={"env": spec}, vec_env_size=4)
    scheme = Scheme.preset("ppo", envs, storage_factory=OnPolicyGAEBuffer.create_factory(size=20))
    with Learner(scheme, target_steps=560, log_dir=tmp_path / "run", seed=1) as learner:
        rating = learner.train()["info_elo"]
    written = sorted(pool.iterdir())
    assert [path.name for path in written] == [f"{80 * n:012}.version" for n in range(1, 8)]
    last = torch.load(written[-1], weights_only=True)
    assert last["elo"] == pytest.approx(rating)


def test_the_keys_that_a_run_records_are_taken(tmp_path: Path) -> None:
    """A run records all entries of its observations, for its test."""
    keys = ("action_mask", "sum")
    options = EnvOptions(selfplay=str(tmp_path), observation_keys=keys)
    assert set(make_env(EnvSpec("agent_games:Turns", options=options), 2).reset(0)) == set(keys)


def test_opponents_are_drawn_in_the_documented_shares(tmp_path: Path) -> None:
    env, _ = games_of_turns(1, tmp_path)
    for step in range(4):
        write_version(tmp_path, step, env, elo=float(step + 1))
    env.reset(0)
    drawn = [env._draw().elo for _ in range(400)]
    assert 0.23 < drawn.count(0.0) / 400 < 0.37  # at random: 0.3
    assert 0.36 < drawn.count(4.0) / 400 < 0.52  # the newest: 0.35, and a quarter of as much
    assert 0.04 < drawn.count(1.0) / 400 < 0.14  # a quarter of 0.35


def test_the_seed_decides_what_opponents_do(tmp_path: Path) -> None:
    plays = []
    for _ in range(2):
        env, games = games_of_turns(4, tmp_path)
        env.reset(3)
        for _ in range(40):
            env.step(np.full(4, 2))
        plays.append([game.taken for game in games])
    assert plays[0] == plays[1]


def test_a_full_disk_costs_a_version_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    env, _ = games_of_turns(1, tmp_path)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1)
    versions = PastVersions(tmp_path, agent, every=100, step=0)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torchbeast.run.checkpoint.save", full)
        versions(100, {})
    assert "No space left on device); the run continues" in capsys.readouterr().err
    versions(200, {})
    assert [path.name for path in tmp_path.iterdir()] == ["000000000200.version"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    env, _ = games_of_turns(1, tmp_path)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"/file.*use another --selfplay"):
        PastVersions(tmp_path / "file", agent, every=1, step=0)
    versions = PastVersions(tmp_path / "pool", agent, every=1, step=0)
    (tmp_path / "pool").rmdir()
    with pytest.raises(RunError, match=r"no version for self-play was written to .*/pool/"):
        versions(1, {})


def test_a_game_of_one_agent_is_refused(tmp_path: Path) -> None:
    class Alone(TwoAgents):
        possible_agents: ClassVar = ["a"]

    with pytest.raises(UsageError, match="needs a game of several agents, and Alone is not one"):
        SelfPlay(vec_env_of(Alone, {}, 1, "Alone"), 2, str(tmp_path))


def test_a_resumed_run_begins_with_the_rating_of_its_newest_version(tmp_path: Path) -> None:
    env, _ = games_of_turns(1, tmp_path)
    agent = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1)
    PastVersions(tmp_path, agent, every=100, step=0)(100, {"info_elo": 70.0})
    PastVersions(tmp_path, agent, every=100, step=100)(200, {"info_elo": math.nan})
    assert torch.load(version_path(tmp_path, 200))["elo"] == 70.0


@pytest.mark.long
def test_a_version_has_the_newest_weights_where_only_workers_have_them(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    spec = EnvSpec("agent_games:Turns", options=EnvOptions(selfplay=str(pool)))
    envs, _, _ = VecEnv.create_factory(env_fn=make_env, env_kwargs={"env": spec}, vec_env_size=4)
    storage = OnPolicyGAEBuffer.create_factory(size=20)
    axes: Any = {"grad_remote_workers": 1, "update_execution": "decentralised"}
    scheme = Scheme.preset("ppo", envs, storage_factory=storage, **axes)
    with Learner(scheme, target_steps=560, log_dir=tmp_path / "run", seed=1) as learner:
        learner.step()
        (path,) = pool.iterdir()
        written = torch.load(path, weights_only=True)["weights"]
        for name, value in learner.actor.state_dict().items():
            torch.testing.assert_close(written[name], value)


def test_a_network_that_cannot_be_imported_is_refused_at_once(tmp_path: Path) -> None:
    class Mine(Always):
        """Only this function knows it."""

    pytest.importorskip("cloudpickle")
    env, _ = games_of_turns(1, tmp_path)
    agent = make_agent(ActorSpec.of(Mine), env.observation_space, env.action_space, 1)
    with pytest.raises(UsageError, match="put the network into a module"):
        PastVersions(tmp_path, agent, every=1, step=0)
