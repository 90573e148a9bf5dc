# SPDX-License-Identifier: Apache-2.0
"""Evaluation plays whole episodes, carries the recurrent state, and favours no environment."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import gymnasium
import numpy as np
import pytest
import torch
from nets_by_hand import deep_by_hand, shallow_by_hand

from torchbeast import envs
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.cli.learner_flags import CommandFlags, MonoBeastFlags
from torchbeast.core.actors.contract import ActorCritic, Agent, ModelInputs, ModelOutput
from torchbeast.core.actors.distributions import distribution_for
from torchbeast.core.actors.registry import default_model, make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.frame_stack import stacked_space
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.envs.spec import EnvConfig, EnvSpec
from torchbeast.envs.toy import Catch
from torchbeast.errors import RunError, UsageError
from torchbeast.evaluation import play as play_module
from torchbeast.evaluation.play import VideoWriter, picture, report, to_frame
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run import episodes as episodes_module
from torchbeast.run.config import EvaluationConfig
from torchbeast.run.episodes import Episodes, RandomStarts, play, usual_random_start

THAT_OF_THE_RUN = envs.EnvSpec("")


class CatchPlayer(ActorCritic):
    """A policy that moves the paddle under the ball."""

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        board = inputs.observation
        ball = board[..., :-1, :].sum(-2).argmax(-1)
        paddle = board[..., -1, :].argmax(-1)
        direction = 1 + (ball - paddle).sign()
        logits = torch.nn.functional.one_hot(direction, 3).float()
        return ModelOutput(logits, torch.zeros_like(inputs.reward), core_state)


class Rememberer(ActorCritic):
    """A policy that keeps the cue of Memory in its state, cleared at an episode's start."""

    def initial_state(self, batch_size: int) -> Any:
        return (torch.zeros(1, batch_size, 1),)

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        (state,) = core_state
        state = state * ~inputs.done.bool()[..., None] + inputs.observation[..., 1:2]
        logits = torch.cat([-state, state], dim=-1)
        return ModelOutput(logits, torch.zeros_like(inputs.reward), (state,))


def agent_of(model: ActorCritic, num_actions: int = 3) -> Agent:
    model.distribution = distribution_for(Discrete(num_actions))
    return Agent(model, ActorSpec("of the test"))


class Lengths:
    """An environment with episodes of its own length; each step has reward 1."""

    observation_space = None

    def __init__(self, length: int) -> None:
        from gymnasium.spaces import Discrete as GymDiscrete

        self.action_space = GymDiscrete(3)
        self._length = length

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._step = 0
        return np.zeros((10, 5), np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        return np.zeros((10, 5), np.float32), 1.0, self._step == self._length, False, {}


def test_the_best_policy_catches_every_ball() -> None:
    agent = agent_of(CatchPlayer())
    assert play(envs.make("Catch", 4), agent, 30, seed=0).returns == [1.0] * 30


def test_the_recurrent_state_is_carried_within_and_cleared_between_episodes() -> None:
    agent = agent_of(Rememberer(), 2)
    assert play(envs.make("Memory", 3), agent, 20, seed=0).returns == [1.0] * 20


def test_short_episodes_are_not_favoured() -> None:
    env = SyncVecEnv([lambda: Lengths(2), lambda: Lengths(11)], "Lengths")
    agent = agent_of(CatchPlayer())
    played = play(env, agent, 8, seed=0)
    assert sorted(played.returns) == [2.0] * 4 + [11.0] * 4
    assert played.lengths == played.returns, "each step rewards 1"


@pytest.mark.parametrize(("episodes", "parallel"), [(1, 1), (5, 2), (7, 7)])
def test_exactly_num_episodes_episodes_are_counted(episodes: int, parallel: int) -> None:
    agent = agent_of(CatchPlayer())
    assert len(play(envs.make("Catch", parallel), agent, episodes, seed=1).returns) == episodes


@pytest.mark.parametrize("parallel", [2, 3, 5])
def test_every_task_is_played_as_often_however_many_environments_it_has(parallel: int) -> None:
    options = envs.EnvOptions(task_returns=(0, 10, 0, 1000))
    env = envs.make(envs.EnvSpec("Catch,tasks_by_hand:late_catch", options=options), parallel)
    played = play(env, agent_of(CatchPlayer()), 10, seed=1)
    assert sorted(played.tasks) == [0] * 10 + [1] * 10
    assert played.mean == pytest.approx((0.1 + 0.0) / 2), "on the scale of the task_returns"


def test_an_evaluation_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(episodes_module, "_SAY_S", 0.0)
    play(SyncVecEnv([lambda: Lengths(2)], "Lengths"), agent_of(CatchPlayer()), 2, seed=0)
    so_far = "episodes have ended; the longest running one is at step"
    expected = [f"{ended} of 2 {so_far} {steps}." for ended, steps in [(0, 1), (1, 2), (1, 1)]]
    assert capsys.readouterr().out.splitlines()[:3] == expected


def test_an_episode_without_an_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert episodes_module.MAX_EPISODE_STEPS > 108_000, "frames of an Atari game"
    monkeypatch.setattr(episodes_module, "MAX_EPISODE_STEPS", 20)
    endless = [lambda: Lengths(2), lambda: Lengths(0)]
    agent = agent_of(CatchPlayer())
    with pytest.raises(RunError, match="Odd: an episode has not ended within 20 steps: set .*tim"):
        play(SyncVecEnv(endless, "Odd"), agent, 2, seed=0)


def test_stacked_frames_reach_the_policy() -> None:
    env = envs.make("Mock", 1)
    agent = make_agent(
        ActorSpec("shallow"), env.observation_space, env.action_space, env.frame_stack
    )
    assert len(play(env, agent, 1, seed=0).returns) == 1


def test_auto_selects_a_network_for_images_and_mlp_for_vectors() -> None:
    image, vector = ArraySpec((1, 84, 84), "uint8"), ArraySpec((8,), "float32")
    assert default_model({"camera": image, "speed": vector}, "deep") == "deep"
    assert default_model((vector, vector), "deep") == "mlp"


def test_auto_selects_small_for_images_too_small_for_the_atari_networks() -> None:
    board, image = ArraySpec((10, 10, 4), "bool"), ArraySpec((36, 36, 3), "uint8")
    assert default_model({"board": board}, "deep") == "small"
    assert default_model({"board": board, "camera": image}, "deep") == "deep"


def test_frames_are_stacked_along_their_first_dimension() -> None:
    image = ArraySpec((1, 84, 84), "uint8")
    assert stacked_space({"camera": image}, 4) == {"camera": ArraySpec((4, 84, 84), "uint8")}


@pytest.mark.parametrize("name", ["no_such_model", "no_such_module:Net", "math:pi"])
def test_a_name_of_no_model_is_refused_with_a_message_about_the_name_alone(name: str) -> None:
    with pytest.raises(ValueError, match=name) as error:
        make_agent(ActorSpec(name), ArraySpec((8,), "float32"), Discrete(3), 1)
    assert "\n" not in str(error.value) and "environment" not in str(error.value)


class RaisingNet(ActorCritic):
    def __init__(self, observation_space: Any, action_space: Any, use_lstm: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(5, 3)

    def forward(self, inputs: Any, core_state: Any) -> Any:
        return self.layer(inputs.observation)


def test_an_error_in_a_users_network_is_told_with_its_line() -> None:
    name = f"{__name__}:RaisingNet"
    with pytest.raises(RunError, match=f"^the model {name} failed: Traceback") as error:
        make_agent(ActorSpec(name), ArraySpec((8,), "float32"), Discrete(3), 1)
    said = str(error.value)
    assert f'File "{__file__}"' in said and "return self.layer(inputs.observation)" in said
    assert "shapes cannot be multiplied" in said and "environment" not in said
    assert "/torch/nn/" not in said and "core/actors" not in said


def test_an_environment_that_suits_no_network_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="^the model mlp cannot be made for this env") as error:
        make_agent(ActorSpec("mlp"), (), Discrete(3), 1)
    assert "\n" not in str(error.value)


def test_the_report_has_each_return_and_their_spread() -> None:
    assert report(Episodes([1.0, -1.0, 1.0], [20, 9, 1000], [7, 7, 7])) == (
        "Returns: 1, -1, 1\nMean 0.33, median 1.00, standard deviation 1.15 over 3 episodes.\n"
        "Episode length: mean 343, min 9, max 1,000.\n"
        "2 of 3 episodes unique"
    )


class Walk:
    """A deterministic game of 150 steps: action a moves a - 1 places; begins 0 to 3 steps late."""

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Discrete(3)
        self._late = 0

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._late = (self._late + 1) % 4
        self._step, self._place = -self._late, 0
        return self._seen(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._step += 1
        if self._step > 0:
            self._place += int(action) - 1
        return self._seen(), 0.0, self._step == 150, False, {}

    def _seen(self) -> np.ndarray:
        return np.array([self._place, max(self._step, 0)], np.float32)


def walk(num_episodes: int, parallel: int = 2, **how: Any) -> Episodes:
    agent = agent_of(Undecided())
    return play(SyncVecEnv([Walk] * parallel, "Walk"), agent, num_episodes, seed=3, **how)


def test_greedy_play_of_a_deterministic_game_is_one_episode_however_late_it_begins() -> None:
    played = walk(8)
    assert sorted(set(played.lengths)) == [150, 151, 152, 153]
    assert played.distinct == 1


def test_random_starts_and_sampled_play_make_episodes_distinct() -> None:
    """The place depends on the random actions; no random action is drawn once in 31 times."""
    torch.manual_seed(0)
    assert walk(8, greedy=False).distinct == 8
    started = walk(40, random_start=30)
    assert started.distinct > 5
    assert started.lengths[:8] == walk(8).lengths, "the random actions are part of the episode"


def test_episodes_that_differ_only_early_are_one_unless_their_returns_differ() -> None:
    assert Episodes([1.0, 1.0, 2.0, 1.0], [9, 8, 8, 8], [5, 5, 5, 6]).distinct == 3


@pytest.mark.parametrize("most", [0, 3])
def test_an_episode_begins_with_at_most_random_start_random_actions(most: int) -> None:
    """The policy always stays; every episode draws its own number of random actions."""
    env = SyncVecEnv([lambda: Lengths(10)] * 4, "Lengths")
    starts, counts = RandomStarts(env, most, seed=0), np.zeros(4, int)
    stays = torch.full((1, 4), -1)
    seen: list[set[int]] = [set() for _ in range(4)]
    for _ in range(30):
        for step in range(10):
            drawn = starts.replace(stays)[0].numpy() != -1
            assert (drawn <= (counts == step)).all(), "no random action follows another's"
            counts += drawn
        for numbers, count in zip(seen, counts.tolist(), strict=True):
            numbers.add(count)
        counts[:] = 0
        starts.count(np.ones(4, bool))
    assert seen == [set(range(most + 1))] * 4


def test_a_lost_life_does_not_repeat_the_random_start() -> None:
    starts = RandomStarts(SyncVecEnv([Walk] * 2, "Walk"), 3, seed=0)
    for _ in range(3):
        starts.replace(torch.zeros(1, 2))
    starts.count(np.array([False, False]))
    assert starts.replace(torch.full((1, 2), -1)).eq(-1).all()


@pytest.mark.parametrize(("env_id", "most"), [("PongNoFrameskip-v4", 30), ("Catch", 0)])
def test_atari_games_begin_with_random_actions_by_default(env_id: str, most: int) -> None:
    env: Any = SimpleNamespace(env_id=env_id)
    assert usual_random_start(env) == most


def test_the_report_says_how_many_episodes_differ_and_how_they_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_test(save_run(tmp_path, "Catch"), random_start=2)
    said = capsys.readouterr().out
    assert "deterministic after 0 to 2 random actions" in said
    assert re.search(r"[123] of 3 episodes unique", said)


def run_test(run: Path, asked: envs.EnvSpec = THAT_OF_THE_RUN, **how: Any) -> int:
    """Plays three episodes of the run; how: further settings."""
    config = EvaluationConfig(**{"num_episodes": 3, **how})
    return play_module.test(run, config, asked, seed=1)


def save_run(folder: Path, env_id: str, **flags: Any) -> Path:
    """Makes a run's folder with a checkpoint of an untrained model."""
    kwargs, options = flags.get("env_kwargs", {}), envs.EnvOptions.of(flags)
    env = envs.make(envs.EnvSpec(env_id, kwargs, options=options), 1)
    lstm, model_kwargs = flags.get("use_lstm", False), flags.get("model_kwargs", {})
    spec = ActorSpec(flags.get("model", "auto"), model_kwargs, use_lstm=lstm)
    agent = make_agent(spec, env.observation_space, env.action_space, env.frame_stack)
    (folder / "run").mkdir()
    saved = {key: {} for key in checkpoints.KEYS} | {
        "model_state_dict": agent.model.state_dict(),
        "flags": {"env": env_id, **flags},
    }
    if "model" in flags:
        saved |= {"format": 1, "model": flags["model"]}
    checkpoints.save(folder / "run" / "model.tar", saved)
    return folder / "run"


@pytest.mark.parametrize("use_lstm", [False, True])
def test_an_evaluation_uses_the_recorded_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], use_lstm: bool
) -> None:
    assert run_test(save_run(tmp_path, "Catch", use_lstm=use_lstm)) == 0
    assert "over 3 episodes." in capsys.readouterr().out


@pytest.mark.parametrize("clipping", ["abs_one", "none"])
def test_in_an_evaluation_the_network_gets_rewards_as_in_training(
    tmp_path: Path, clipping: str
) -> None:
    run = save_run(tmp_path, "Catch")
    path = run / "model.tar"
    checkpoints.save(path, checkpoints.load(path) | {"reward_input": clipping})
    assert [player.model.reward_input for player in players(run)] == [clipping]


def players(run: Path) -> list[Agent]:
    """Returns the agent of an evaluation, without playing."""
    found: list[Agent] = []

    def note(env: VecEnv, agent: Agent, *_: Any, **__: Any) -> Episodes:
        found.append(agent)
        return Episodes([0.0], [1], [2])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play_module, "play", note)
        assert run_test(run) == 0
    return found


@pytest.fixture
def three_threads() -> Iterator[None]:
    """Torch's operations use three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_an_evaluation_computes_in_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are so small that others would only take time from other processes."""
    run, seen = save_run(tmp_path, "Catch"), []

    def note(*_: Any, **__: Any) -> Episodes:
        seen.append(torch.get_num_threads())
        return Episodes([0.0], [1], [2])

    monkeypatch.setattr(episodes_module, "_play", note)
    assert run_test(run) == 0
    assert seen == [1] and torch.get_num_threads() == 3


class WideCatch(Catch):
    """Catch in which every ball is caught, wherever the paddle is."""

    def step(self, action: Any) -> VecStep:
        step = super().step(action)
        return step._replace(reward=np.abs(step.reward))


def wide_catch(num_envs: int) -> VecEnv:
    return WideCatch(num_envs)


def test_an_evaluation_plays_the_environment_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, other = save_run(tmp_path, "Catch"), f"{__name__}:wide_catch"
    assert run_test(run, envs.EnvSpec(other), num_episodes=8) == 0
    said = capsys.readouterr().out
    assert "(trained on Catch), " in said and "Mean 1.00" in said


@pytest.mark.parametrize("other", ["CartPole-v1", "Mock"])
def test_an_evaluation_in_an_environment_that_does_not_fit_is_refused(
    tmp_path: Path, other: str
) -> None:
    run = save_run(tmp_path, "Catch")
    with pytest.raises(UsageError, match=f"trained on Catch cannot play {other}") as error:
        run_test(run, envs.EnvSpec(other))
    assert str(error.value).endswith(
        "actions differ: remove --env and --preset"
    ) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "sticky"),
    [("", 0.25), ("ALE/Pong-v5", 0.25), ("envpool:Pong-v5", None), ("my_module:make", None)],
)
def test_recorded_options_of_atari_games_are_for_atari_games(
    name: str, sticky: float | None
) -> None:
    saved = {"flags": {"env": "PongNoFrameskip-v4", "sticky_actions": 0.25}}
    spec = play_module.env_of(saved, envs.EnvSpec(name))
    assert spec.options.sticky_actions == sticky


@pytest.mark.parametrize(("name", "scale"), [("", (0, 9, 0, 5)), ("Catch,Mock", ())])
def test_the_recorded_scale_of_returns_is_for_the_tasks_of_training(
    name: str, scale: tuple[int, ...]
) -> None:
    saved = {"flags": {"env": "Catch,Memory", "task_returns": (0, 9, 0, 5)}}
    assert play_module.env_of(saved, envs.EnvSpec(name)).options.task_returns == scale


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
def test_gray_levels_of_any_dtype_are_shown_as_they_are(dtype: str) -> None:
    assert (to_frame(np.full((1, 36, 36, 1), 100, dtype)) == 100).all()


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_small_numbers_are_visible(dtype: str) -> None:
    assert (to_frame(np.full((1, 36, 36, 1), 5, dtype)) == 255).all()


class Late:
    """Episodes of three steps that begin one step late; notes the actions that count."""

    env_id, num_envs, frame_stack = "Late", 1, 1
    observation_space, action_space = ArraySpec((10, 5), "float32"), Discrete(3)

    def __init__(self) -> None:
        self.executed: list[int] = []

    def reset(self, seed: int) -> np.ndarray:
        self._time = 0
        return self._seen()

    def step(self, action: Any) -> VecStep:
        resets = np.array([self._time == 3])
        self._time = 0 if resets[0] else self._time + 1
        self.executed += [] if resets[0] else [int(action[0])]
        ended, nothing = np.array([self._time == 3]), np.zeros(1, bool)
        reward = np.zeros(1, np.float32)
        return VecStep(self._seen(), reward, ended | resets, nothing, ended, None, resets)

    def close(self) -> None: ...

    def _seen(self) -> np.ndarray:
        return np.full((1, 10, 5), self._time, np.float32)


def test_an_action_that_only_begins_an_episode_is_not_one_of_its_steps() -> None:
    assert play(Late(), agent_of(Undecided()), 4, seed=3).distinct == 1
    env = Late()
    play(env, agent_of(Undecided()), 30, seed=3, random_start=1)
    assert {*env.executed[3::3]} != {1}, "later episodes begin with random actions too"


@pytest.mark.parametrize(
    ("program", "parsed"), [("monobeast", MonoBeastFlags), ("polybeast", PolyBeastFlags)]
)
def test_every_program_evaluates_in_the_environment_that_is_named(
    program: str, parsed: Any
) -> None:
    environment = EnvConfig(env="Catch", observation_keys=("image",))
    tests = CommandFlags(mode="test")
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module(f"torchbeast.{program}")
        patch.setattr(
            "torchbeast.evaluation.play.test",
            lambda folder, config, asked, seed, film: seen.append(asked) or 0,
        )
        module.run(parsed(command=tests, environment=environment))
        module.run(parsed(command=tests))
    options = envs.EnvOptions(observation_keys=("image",))
    assert seen == [envs.EnvSpec("Catch", options=options), envs.EnvSpec("")]


def test_an_evaluation_uses_the_recorded_options_of_a_game_by_default(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    recorded = {"full_action_space": True, "frame_skip": 50, "sticky_actions": None}
    run = save_run(tmp_path, "ALE/Pong-v5", model="mlp", **recorded)
    made: list[envs.EnvSpec] = []

    def make(spec: envs.EnvSpec, num_envs: int, **_: Any) -> VecEnv:
        made.append(spec)
        return envs.make(spec, num_envs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(play_module, "EnvProcess", make)
        patch.setattr(play_module, "play", lambda *_, **__: Episodes([0.0], [1], [2]))
        run_test(run)
        asked = envs.EnvOptions(frame_skip=4, sticky_actions=0.0)
        run_test(run, envs.EnvSpec("", options=asked))
    as_trained = envs.EnvOptions(full_action_space=True, frame_skip=50)
    told = envs.EnvOptions(full_action_space=True, frame_skip=4, sticky_actions=0.0)
    assert made == [envs.EnvSpec("ALE/Pong-v5", options=it) for it in (as_trained, told)]


def test_an_evaluation_uses_the_recorded_keyword_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kwargs = {"env_kwargs": {"rows": 4}, "model_kwargs": {"hidden": 24}}
    run = save_run(tmp_path, "Catch", model="mlp", **kwargs)
    assert run_test(run) == 0
    assert "length: mean 3," in capsys.readouterr().out
    with pytest.raises(UsageError, match="does not fit: .*"):
        run_test(run, envs.EnvSpec("", {"rows": 5}))
    with pytest.raises(UsageError, match="cannot play Memory"):
        run_test(run, envs.EnvSpec("Memory"))


class Undecided(ActorCritic):
    """A policy that slightly prefers to stay."""

    def forward(self, inputs: ModelInputs, core_state: Any) -> ModelOutput:
        logits = torch.tensor([0.0, 0.1, 0.0]).expand(*inputs.reward.shape, 3)
        return ModelOutput(logits, torch.zeros_like(inputs.reward), core_state)


class Counting(Lengths):
    """An environment that rewards staying."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, _, *rest = super().step(action)
        return observation, float(action == 1), *rest


def test_greedy_play_takes_the_most_likely_action_and_sampled_play_others_too() -> None:
    agent = agent_of(Undecided())

    def returns(greedy: bool, seed: int) -> list[float]:
        env = SyncVecEnv([lambda: Counting(30)], "Counting")
        return play(env, agent, 3, seed=seed, greedy=greedy).returns

    assert returns(greedy=True, seed=0) == [30.0] * 3
    sampled = returns(greedy=False, seed=0)
    assert all(3 <= value <= 20 for value in sampled), "about a third"
    assert returns(greedy=False, seed=0) == sampled != returns(greedy=False, seed=1)


def test_the_flag_sampled_makes_an_evaluation_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path, "Catch")
    assert run_test(run) == 0 and "deterministic" in capsys.readouterr().out
    seen: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        played = Episodes([0], [1], [2])
        patch.setattr(play_module, "play", lambda *_, greedy, **__: seen.append(greedy) or played)
        run_test(run)
        run_test(run, sampled=True)
    assert seen == [True, False] and "sampled actions" in capsys.readouterr().out


def save_original(folder: Path, model: str, use_lstm: bool, **more: Any) -> Path:
    """Saves a checkpoint like the original programs: without the name of the network, with devices.

    The original's networks clip rewards even if the loss does not.
    """
    env = envs.make("Mock", 1)
    agent = make_agent(
        ActorSpec(model, use_lstm=use_lstm),
        env.observation_space,
        env.action_space,
        env.frame_stack,
    )
    flags = {"env": "Mock", "use_lstm": use_lstm, "device": torch.device("cpu"), "num_buffers": 60}
    flags["reward_clipping"] = "none"
    optimiser: dict[str, Any] = {"optimizer_state_dict": {}, "scheduler_state_dict": {}}
    saved = {"model_state_dict": agent.model.state_dict(), "flags": flags, **optimiser, **more}
    (folder / "run").mkdir()
    torch.save(saved, folder / "run" / "model.tar")
    return folder / "run"


@pytest.mark.parametrize("use_lstm", [False, True])
def test_a_checkpoint_of_the_original_monobeast_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], use_lstm: bool
) -> None:
    assert run_test(save_original(tmp_path, "shallow", use_lstm), num_episodes=1) == 0
    assert "over 1 episode." in capsys.readouterr().out


def test_a_checkpoint_of_the_original_polybeast_is_played(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The counts of its files are numpy scalars."""
    stats = {"step": 1000, "episode_returns": (np.float32(1.5), np.float64(2.0))}
    assert run_test(save_original(tmp_path, "deep", False, stats=stats), num_episodes=1) == 0
    assert "step 1,000," in capsys.readouterr().out


def test_published_weights_of_pong_fit_their_network() -> None:
    """The shapes are those of the original's network with Pong's six actions."""
    pytest.importorskip("ale_py")
    convolutions = {"conv1": (32, 4, 8, 8), "conv2": (64, 32, 4, 4), "conv3": (64, 64, 3, 3)}
    linear = {"fc": (512, 3136), "policy": (6, 519), "baseline": (1, 519)}
    weights = {}
    for name, shape in (convolutions | linear).items():
        weights[f"{name}.weight"], weights[f"{name}.bias"] = torch.ones(shape), torch.ones(shape[0])
    saved = {"model_state_dict": weights, "flags": {"env": "PongNoFrameskip-v4"}}
    with closing(envs.make("PongNoFrameskip-v4", 1)) as env:
        agent = play_module.restored(saved, play_module.agent_spaces(env), Path("model.tar"))
    assert all(parameter.eq(1).all() for parameter in agent.model.parameters())


@pytest.mark.parametrize("use_lstm", [False, True])
@pytest.mark.parametrize(
    ("model", "by_hand"), [("shallow", shallow_by_hand), ("deep", deep_by_hand)]
)
def test_a_checkpoint_of_the_original_is_played_by_the_originals_formula(
    tmp_path: Path, model: str, by_hand: Any, use_lstm: bool
) -> None:
    run = save_original(tmp_path, model, use_lstm)
    weights = torch.load(run / "model.tar")["model_state_dict"]
    inputs = ModelInputs(
        torch.randint(256, (3, 2, 4, 84, 84), dtype=torch.uint8),
        torch.tensor([[0.0, 0.3], [7.0, -7.0], [-0.3, 1.0]]),
        torch.tensor([[True, True], [False, False], [False, True]]),
        torch.randint(6, (3, 2)),
    )
    (player,) = players(run)
    with torch.no_grad():
        output = player.model(inputs, player.model.initial_state(2))
    logits, baseline = by_hand(weights, inputs)
    torch.testing.assert_close(output.policy_logits, logits)
    torch.testing.assert_close(output.baseline, baseline)
    assert torch.equal(output.policy_logits.argmax(-1), logits.argmax(-1))


def test_an_evaluation_without_a_checkpoint_is_refused_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no checkpoint"):
        run_test(tmp_path / "nothing")


def test_a_video_is_written_of_images_and_refused_for_vectors(tmp_path: Path) -> None:
    with closing(VideoWriter(tmp_path / "video.mp4")) as video:
        for _ in range(5):
            video.write(to_frame(np.random.randint(0, 255, (1, 4, 84, 84), np.uint8)))
    assert (tmp_path / "video.mp4").stat().st_size > 1000
    with pytest.raises(UsageError, match="use --mode test"):
        to_frame(np.zeros((1, 8), np.float32))


class Drawing:
    """An environment of Gymnasium that renders itself in red."""

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), 1.0, False, False, {}

    def render(self) -> np.ndarray:
        return np.full((480, 240, 3), (255, 0, 0), np.uint8)


def test_an_environment_that_can_render_is_filmed_by_its_render(tmp_path: Path) -> None:
    env = SyncVecEnv([Drawing], "Drawing")
    frame = picture(env.render(), env.reset(0))
    assert frame.shape == (480, 240, 3) and (frame == (255, 0, 0)).all()
    with closing(VideoWriter(tmp_path / "video.mp4")) as video:
        video.write(frame)
    shown = cv2.VideoCapture(str(tmp_path / "video.mp4")).read()[1]
    blue, _, red = shown.mean((0, 1))
    assert red > 200 and blue < 50, "OpenCV's colours are in another order"


class Undrawn(gymnasium.Env):  # type: ignore[type-arg]
    """Leaves out `render`, and has no parameter render_mode."""

    observation_space = gymnasium.spaces.Box(0, 255, (8, 8, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(**kwargs)
        return np.zeros((8, 8, 3), np.uint8), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros((8, 8, 3), np.uint8), 1.0, True, False, {}


def test_an_environment_without_render_is_filmed_by_its_observations() -> None:
    gymnasium.register("Undrawn-v0", Undrawn)
    with closing(envs.make(EnvSpec("Undrawn-v0"), 1, render=True)) as env:
        assert env.render() is None  # type: ignore[attr-defined]


class Wrapped(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Makes what it wraps."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(gymnasium.make("CartPole-v1", render_mode=render_mode))


def test_an_id_may_be_a_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium.register("Wrapped-v0", Wrapped)
    for render in (False, True):
        with closing(envs.make(EnvSpec("Wrapped-v0"), 1, render=render)) as env:
            assert env.reset(1).shape == (1, 4)  # type: ignore[union-attr]


def test_bool_channels_are_shown_in_a_gray_of_their_own() -> None:
    board = np.zeros((1, 10, 10, 4), bool)
    board[0, 2, 3, 0] = board[0, 5, 5, 3] = True
    frame = to_frame(board)
    assert frame.shape == (240, 240, 3)
    assert (frame[48:72, 72:96] == 255).all() and (frame[120:144, 120:144] == 80).all()
    assert frame.astype(int).sum() == 24 * 24 * 3 * (255 + 80)


def test_a_board_with_as_many_channels_as_rows_has_them_last() -> None:
    """MinAtar's Seaquest."""
    board = np.zeros((1, 10, 10, 10), bool)
    board[0, 2, 3, 0] = board[0, 5, 5, 9] = True
    frame = to_frame(board)
    assert (frame[48:72, 72:96] == 255).all() and (frame[120:144, 120:144] == 80).all()
    assert frame.astype(int).sum() == 24 * 24 * 3 * (255 + 80)


def test_the_frame_of_a_video_is_the_newest_one() -> None:
    stack = np.stack([np.full((84, 84), value, np.uint8) for value in (1, 2, 3, 9)])[None]
    frame = to_frame(stack)
    assert frame.shape == (252, 252, 3) and (frame == 9).all()
