# SPDX-License-Identifier: Apache-2.0
"""Environments of several tasks: which plays which task, and what an observation carries."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import agent_games
import numpy as np
import pytest
import tasks_by_hand
import torch

from torchbeast import envs
from torchbeast.core.actors.contract import ModelInputs
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.envs.sync_vec_env import environment_seeds
from torchbeast.core.envs.tasks import TASK, dealt, num_tasks, tasks_in, without_task
from torchbeast.envs.env_process import spaces_of
from torchbeast.envs.spec import EnvOptions, EnvSpec
from torchbeast.errors import UsageError
from torchbeast.servers.config import ServedEnvConfig

TWO = "Catch,tasks_by_hand:late_catch"


def numbers(env: Any) -> list[int]:
    return tasks_in(env.reset(1)).tolist()


@pytest.mark.parametrize("shares", [(1, 1, 1), (2, 1, 1), (5, 0, 2), (0.5, 0.25, 0.25)])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1] * 12, [3, 2, 7]])
def test_workers_of_any_size_together_have_the_shares(shares: Any, sizes: list[int]) -> None:
    firsts = np.cumsum([0, *sizes])
    parts = [dealt(shares, int(f), n) for f, n in zip(firsts, sizes, strict=False)]
    assert [sum(part) for part in parts] == sizes
    counts = np.sum(parts, 0)
    assert np.all(np.abs(counts - 12 * np.array(shares) / sum(shares)) < 1)
    for part, size in zip(parts, sizes, strict=True):
        assert dealt(part, 0, size) == part  # as a worker deals its own


def test_an_observation_carries_the_number_of_its_task_and_networks_do_not_see_it() -> None:
    env = envs.make(TWO, 5)
    assert numbers(env) == [0, 0, 0, 1, 1]
    seen = env.reset(1)
    assert without_task(seen).shape == (5, 10, 5)
    space = env.observation_space
    assert num_tasks(space) == 2
    assert without_task(space) == ArraySpec((10, 5), "float32")


def test_an_environments_own_task_number_is_an_entry_like_any_other() -> None:
    space = {"board": ArraySpec((4,), "float32"), "task_number": ArraySpec((3,), "float32")}
    assert num_tasks(space) == 1 and without_task(space) == space


def test_a_network_has_a_value_for_each_task_and_one_policy() -> None:
    env = envs.make(TWO, 2)
    model: Any = make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1).model
    with torch.no_grad():
        model.baseline.bias.copy_(torch.tensor([5.0, -5.0]))
        model.baseline.weight.zero_()
    seen = {name: torch.as_tensor(leaf)[None] for name, leaf in env.reset(1).items()}
    seen["observation"][0, 1] = seen["observation"][0, 0]
    row = torch.zeros(1, 2)
    output = model(ModelInputs(seen, row, row.bool(), row.long()), ())
    assert output.baseline.tolist() == [[5.0, -5.0]]
    seen[TASK][0] = torch.tensor([[-1], [7]])  # of a hostile host
    output = model(ModelInputs(seen, row, row.bool(), row.long()), ())
    assert output.baseline.tolist() == [[5.0, -5.0]]
    assert torch.equal(output.policy_logits[0, 0], output.policy_logits[0, 1])


def test_a_recurrent_q_network_has_one_value_for_all_tasks() -> None:
    env = envs.make(TWO, 2)
    spec = ActorSpec("r2d2-mlp", use_lstm=True)
    model: Any = make_agent(spec, env.observation_space, env.action_space, 1).model
    assert model.baseline.out_features == 1


def test_with_task_input_networks_see_the_number() -> None:
    options = EnvOptions(task_input=True)
    env = envs.make(EnvSpec(TWO, options=options), 2)
    assert sorted(without_task(env.observation_space)) == ["observation", "task_input"]


def test_environments_step_as_each_task_does_alone() -> None:
    both, actions = envs.make(TWO, 4), np.random.default_rng(0).integers(3, size=(30, 4))
    alone = [envs.make(name, 2) for name in TWO.split(",")]
    both.reset(3)
    for env, seed in zip(alone, environment_seeds(3, 2), strict=True):
        env.reset(seed)
    ends = 0
    for action in actions:
        step = both.step(action)
        first, second = (env.step(action[n : n + 2]) for env, n in zip(alone, (0, 2), strict=True))
        for name in ("reward", "terminated", "truncated", "episode_end"):
            parts = [getattr(first, name), getattr(second, name)]
            assert np.array_equal(getattr(step, name), np.concatenate(parts))
        seen = np.concatenate([first.observation, second.observation])
        assert np.array_equal(without_task(step.observation), seen)
        if step.truncated.any():
            ends += 1
            assert np.array_equal(without_task(step.final_observation), second.final_observation)
            assert tasks_in(step.final_observation).tolist() == [1] * int(step.truncated.sum())
    assert ends > 10


def test_a_host_may_serve_one_task_of_the_list() -> None:
    options = EnvOptions(task_shares=(0, 1))
    env = envs.make(EnvSpec(TWO, options=options), 2)
    assert numbers(env) == [1, 1]
    assert env.observation_space == envs.make(TWO, 2).observation_space


def test_tasks_of_other_spaces_are_refused_with_what_differs() -> None:
    with pytest.raises(UsageError, match="the observation_space of Catch is .*, and that of Mem"):
        spaces_of(EnvSpec("Catch,Memory"), lambda: None)
    pytest.importorskip("minatar")
    with pytest.raises(UsageError, match="the action_space of MinAtar/Breakout-v1 is"):
        envs.make("MinAtar/Breakout-v1,MinAtar/Asterix-v1", 2)


def test_games_of_several_agents_are_refused_as_tasks_and_so_is_selfplay() -> None:
    with pytest.raises(UsageError, match=r"#1 is a game of several agents"):
        envs.make(EnvSpec.of_tasks(["Catch", lambda: agent_games.Visits()]), 6)
    with pytest.raises(UsageError, match="selfplay is for one game"):
        envs.make(EnvSpec(TWO, options=EnvOptions(selfplay="pool")), 2)


def test_a_learner_compares_its_task_returns_with_the_servers_tasks() -> None:
    polybeast_learner = pytest.importorskip("torchbeast.polybeast_learner", exc_type=ImportError)
    own = ServedEnvConfig(task_returns=(0, 1))
    with pytest.raises(UsageError, match="has 2, and there are 0 task_shares and 1 pairs"):
        polybeast_learner._with_own_options(EnvSpec(TWO), own)


def test_a_learner_warns_if_only_the_servers_have_selfplay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    polybeast_learner = pytest.importorskip("torchbeast.polybeast_learner", exc_type=ImportError)
    served = EnvSpec("Game", options=EnvOptions(info_keywords=("elo",)))
    polybeast_learner._with_own_options(served, ServedEnvConfig(selfplay="pool"))
    assert not capsys.readouterr().err
    polybeast_learner._with_own_options(served, ServedEnvConfig())
    assert "add --selfplay to polybeast_learner too" in capsys.readouterr().err


def test_minatars_games_are_padded_to_the_channels_of_the_largest() -> None:
    pytest.importorskip("minatar")
    env = envs.make("MinAtar/Breakout-v0,MinAtar/Seaquest-v0", 2)
    assert without_task(env.observation_space) == ArraySpec((10, 10, 10), "bool")
    boards = without_task(env.reset(1))
    plain = envs.make("MinAtar/Breakout-v0", 1).reset(1)
    assert not boards[0, ..., plain.shape[-1] :].any()
    assert boards[1].any()


def test_a_list_of_functions_is_a_list_of_tasks() -> None:
    factory = envs.make_vec(["Catch", tasks_by_hand.late_catch, lambda num_envs: late(num_envs)], 3)
    assert num_tasks(factory.observation_space) == 3
    assert numbers(factory()) == [0, 1, 2]


def test_a_function_is_one_task_whatever_its_name() -> None:
    function = functools.partial(envs.make, "Catch", 1)
    assert len(EnvSpec.of(function).task_names) == len(EnvSpec.naming(function).task_names) == 1


def test_make_vec_makes_one_environment_of_one_task_and_keeps_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, make = list[str](), envs._make
    monkeypatch.setattr(envs, "_make", lambda e, *args: [made.append(e.name), make(e, *args)][1])
    spec = EnvSpec.of(lambda num_envs: late(num_envs))
    assert envs.make_vec(spec).env_kwargs["env"] == spec
    assert made.count(spec.name) == 1


def late(num_envs: int) -> Any:
    return envs.make("Catch", num_envs)


def test_shares_are_for_a_list_of_tasks() -> None:
    with pytest.raises(ValueError, match="task_shares must be numbers from 0"):
        EnvOptions(task_shares=(math.inf, 1.0))
    with pytest.raises(UsageError, match="for a list of different tasks: Catch has 1"):
        envs.make(EnvSpec("Catch", options=EnvOptions(task_shares=(1, 2))), 1)
    with pytest.raises(UsageError, match="Catch,Catch has 1"):
        envs.make("Catch,Catch", 2)
    spec = EnvSpec(TWO)
    assert spec.dealt(1, 2).options.task_shares == (1, 1)
    assert dataclasses.replace(spec, name="Catch").dealt(1, 2).options.task_shares == ()
    assert TASK in envs.make(spec, 1).reset(0)
