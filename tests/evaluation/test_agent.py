# SPDX-License-Identifier: Apache-2.0
"""An agent that is loaded acts as the network did in training, without the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn import CASES, IMAGE, MASKED, VECTOR, Case, Drawn, agent_of, of, save

from torchbeast import load_agent
from torchbeast.core.actors.contract import Mode
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.base.nest import flatten, map_leaves, map_leaves2
from torchbeast.core.envs.spaces import Box
from torchbeast.errors import RunError, UsageError
from torchbeast.evaluation import agent as agent_module
from torchbeast.run import checkpoint as checkpoints

STEPS = 25


def trained_actions(case: Case, num_envs: int, mode: Mode) -> tuple[Drawn, list[Any]]:
    """Returns environments in which the network acted as in training, and what it said."""
    env, said = Drawn(case, num_envs), []
    loop = EnvLoop(env, agent_of(case).model, seed=0)
    torch.manual_seed(3)
    for _ in range(STEPS):
        loop.act(mode)
        said.append(loop.acted)
        loop.step()
    return env, said


def in_bounds(space: Any, action: np.ndarray) -> np.ndarray:
    """Returns what an environment executes."""
    if not isinstance(space, Box):
        return action
    bounds = (np.reshape(np.float32(bound), space.shape) for bound in (space.low, space.high))
    return np.clip(action, *bounds).astype(space.dtype)


@pytest.mark.parametrize(("num_envs", "mode"), [(1, "greedy"), (3, "sample")])
@pytest.mark.parametrize("name", CASES)
def test_a_loaded_agent_takes_the_actions_of_training(
    name: str, num_envs: int, mode: Mode, tmp_path: Path
) -> None:
    case = CASES[name]
    env, said = trained_actions(case, num_envs, mode)
    save(tmp_path / "model.tar", agent_of(case))
    agent = load_agent(tmp_path)
    torch.manual_seed(3)
    assert len({str((acted.action, acted.extras)) for acted in said}) == STEPS
    for step, executed, acted in zip(env.sent, env.executed, said, strict=False):
        given = step if num_envs > 1 else map_leaves(lambda leaf: leaf[0], step)
        taken = agent.act(*given, sampled=mode == "sample")
        expected = map_leaves2(in_bounds, case.actions, executed)
        if num_envs == 1:
            expected = map_leaves(lambda leaf: leaf[0], expected)
        map_leaves2(lambda a, b: np.testing.assert_allclose(a, b, 0, 1e-5), taken, expected)
        assert [a.dtype for a in flatten(taken)] == [a.dtype for a in flatten(expected)]
        for extra, value in acted.extras.items():
            assert agent.acted is not None
            torch.testing.assert_close(agent.acted.extras[extra], value, atol=1e-5, rtol=0)


def test_after_a_reset_an_agent_knows_nothing_of_before(tmp_path: Path) -> None:
    save(tmp_path / "model.tar", agent_of(CASES["box"]))
    agent, random = load_agent(tmp_path), np.random.default_rng(0)
    first, second = random.normal(size=(2, 4))
    before = agent.act(first)
    assert not np.allclose(agent.act(first, 1.0), before)
    agent.reset()
    assert not np.allclose(agent.act(second), before)
    agent.reset()
    assert np.array_equal(agent.act(first), before)
    agent.reset()
    assert agent.act([first, first]).shape == (2, 2)


def test_an_observation_may_have_entries_that_the_agent_does_not_use(tmp_path: Path) -> None:
    save(tmp_path / "model.tar", agent_of(CASES["masked"]))
    seen = {key: np.ones(spec.shape, spec.dtype) for key, spec in MASKED.items()}
    agent = load_agent(tmp_path)
    action = agent.act({**seen, "goal": "to be ignored"})
    agent.reset()
    assert action == agent.act({**seen, "numbers": [1, 1, 1, 1]})


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("lstm", (np.zeros(3),), r"expected float64 of shape \(4,\), as in the environment's"),
        ("lstm", (np.zeros((2, 5)),), r"expected float64 of shape \(2, 4\)"),
        ("lstm", (np.zeros(4),), "the network reads the reward of the last step, got none"),
        ("lstm", (np.zeros((2, 4)), 0.0), "acts for 1 environments, got observations of 2"),
        ("masked", (np.zeros(4),), "expected a dict with the keys"),
    ],
)
def test_what_does_not_fit_the_agent_is_refused(
    name: str, given: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    save(tmp_path / "model.tar", agent_of(CASES[name]))
    agent = load_agent(tmp_path)
    if name == "lstm":
        agent.act(np.zeros(4))
    with pytest.raises(ValueError, match=message):
        agent.act(*given)


def test_a_mask_that_rules_out_everything_is_an_error(tmp_path: Path) -> None:
    save(tmp_path / "model.tar", agent_of(CASES["masked"]))
    with pytest.raises(RunError, match="forbids every action"):
        load_agent(tmp_path).act({key: np.zeros(s.shape, s.dtype) for key, s in MASKED.items()})


def test_a_call_that_fails_leaves_the_agent_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "model.tar", agent_of(CASES["shallow"]))
    frames = np.random.default_rng(0).integers(0, 255, (3, *IMAGE.shape), np.uint8)
    said = []
    for fails in (False, True):
        agent = load_agent(tmp_path)
        agent.act(frames[0])
        if fails:
            with monkeypatch.context() as broken, pytest.raises(TypeError):
                broken.setattr(agent.agent.model, "choose", None)
                agent.act(frames[1], 1.0)
        agent.act(frames[2], 1.0)
        assert agent.acted is not None
        said.append(agent.acted.extras["policy_logits"])
    assert said[0].equal(said[1])


def test_an_off_policy_agent_needs_no_reward(tmp_path: Path) -> None:
    save(tmp_path / "model.tar", agent_of(CASES["td3"]))
    agent = load_agent(tmp_path / "model.tar")
    assert np.array_equal(agent.act(np.ones(4)), agent.act(np.ones(4)))


@pytest.mark.parametrize("name", ["lstm", "shallow", "td3"])
def test_predict_is_act_with_the_memory_outside_the_agent(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    save(tmp_path / "model.tar", agent_of(case))
    agent, other = load_agent(tmp_path), load_agent(tmp_path)
    env, _ = trained_actions(case, 3, "greedy")
    state = None
    for observation, _, done in env.sent:
        action, state = agent.predict(observation, state, episode_start=done)
        assert np.array_equal(action, other.act(observation, 0.0, done))
        assert agent.acted is None, "nothing is kept inside"
    again, _ = agent.predict(env.sent[-1][0])
    torch.manual_seed(1)
    drawn = [agent.predict(env.sent[-1][0], deterministic=False)[0] for _ in range(9)]
    assert name == "td3" or len({str(action) for action in drawn}) > 1
    one, _ = agent.predict(env.sent[-1][0][0])
    np.testing.assert_allclose(one, again[0], 0, 1e-5)


def no_environment(*_: Any) -> Any:
    raise AssertionError("an environment was made")


def test_no_environment_is_made_for_a_checkpoint_that_records_its_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one that the record calls with arguments of its choice."""
    monkeypatch.setattr(agent_module, "EnvProcess", no_environment)
    flags = {"env": "os:system", "env_kwargs": {"command": "true"}}
    save(tmp_path / "model.tar", agent_of(CASES["mlp"]), **flags)
    load_agent(tmp_path).act(np.zeros(4))


def test_the_environment_is_asked_for_spaces_that_a_checkpoint_does_not_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save(tmp_path / "model.tar", agent_of(CASES["shallow"]), env=of("shallow"))
    without = {key: value for key, value in saved.items() if not key.endswith(("_space", "_stack"))}
    checkpoints.save(tmp_path / "model.tar", without)
    agent = load_agent(tmp_path)
    assert agent.agent.single_frame_space == IMAGE and agent.agent.frame_stack == 4
    monkeypatch.setattr(agent_module, "EnvProcess", no_environment)
    without["flags"]["env_kwargs"] = {"command": "true"}
    checkpoints.save(tmp_path / "model.tar", without)
    with pytest.raises(
        UsageError,
        match="functions named on the command line: if you trust this run to call drawn:shallow",
    ):
        load_agent(tmp_path)
    with pytest.raises(AssertionError, match="an environment was made"):
        load_agent(tmp_path, env=of("shallow"))


def test_features_are_computed_in_the_precision_asked_for(tmp_path: Path) -> None:
    save(tmp_path / "model.tar", agent_of(Case("mlp", VECTOR)))
    said = []
    for precision in ("float32", "bfloat16"):
        agent = load_agent(tmp_path, precision=precision)  # type: ignore[arg-type]
        agent.act(np.ones(4))
        assert agent.acted is not None
        said.append(agent.acted.extras["policy_logits"])
    assert 0 < (said[0] - said[1]).abs().max() < 0.1
