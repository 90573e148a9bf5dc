# SPDX-License-Identifier: Apache-2.0
"""Hindsight solves setting bits to a goal, which pays nothing on the way; plain replay does not.

Environment, replay, algorithm and optimiser step are the programs' own; the loop is the test's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from torchbeast.collect.replayed import transitions_of
from torchbeast.core.actors.contract import ModelInputs
from torchbeast.core.actors.off_policy import QNetwork
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.algos.config import DQNConfig, OptimiserConfig, StepConfig
from torchbeast.core.algos.dqn import DQN
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.storages.replay.transition_replay import UNIFORM, TransitionReplay
from torchbeast.core.storages.rollout import RolloutSpec
from torchbeast.core.update.optimiser_step import OptimiserStep
from torchbeast.envs.env_process import outcome_in
from torchbeast.envs.toy import BitFlip

BITS, ENVS, ROUNDS, UPDATES, BATCH = 9, 16, 250, 8, 64


def act(actor: QNetwork, seen: Any, mode: Any) -> np.ndarray:
    zeros = torch.zeros(1, ENVS)
    observation = map_leaves(lambda leaf: torch.from_numpy(leaf).unsqueeze(0), seen)
    inputs = ModelInputs(observation, zeros, zeros.bool(), zeros.long())
    action = actor.act(inputs, (), mode).action
    assert isinstance(action, torch.Tensor)
    return action[0].numpy()


def solved(actor: QNetwork) -> float:
    """The share of episodes in which greedy actions reach the goal."""
    env, reached, ended = BitFlip(ENVS, BITS), 0, 0
    seen = env.reset(99)
    for _ in range(30 * BITS):
        step = env.step(act(actor, seen, "greedy"))
        seen = step.observation
        reached, ended = reached + step.terminated.sum(), ended + step.episode_end.sum()
    return float(reached / ended)


def learnt(hindsight_share: float, seed: int = 5) -> float:
    """What is solved after some thousand steps: rollouts of one step, each followed by updates."""
    torch.manual_seed(seed)
    env = BitFlip(ENVS, BITS)
    spec = ActorSpec("q-mlp", {"hidden": 64})
    agent = make_agent(spec, env.observation_space, env.action_space, frame_stack=1)
    actor = agent.model
    assert isinstance(actor, QNetwork)
    adam = OptimiserConfig(optimiser="adam", learning_rate=0.002, epsilon=1e-8)
    config = DQNConfig(
        discounting=0.98,
        reward_clipping="none",
        target_period=50,
        exploration_steps=2000,
        optimiser=adam,
    )
    step = OptimiserStep(DQN(actor, config), StepConfig(), total_steps=2 * ROUNDS * ENVS)
    fields = RolloutSpec(agent, (), unroll_length=1).fields(ENVS)
    outcome = outcome_in(env, "BitFlip") if hindsight_share else None
    sampling = replace(UNIFORM, hindsight=outcome, hindsight_share=hindsight_share)
    replay = TransitionReplay(fields, 20_000, seed=seed, sampling=sampling)
    seen = env.reset(seed)
    before = rows(fields, seen)
    before["done"][:] = True
    for number in range(ROUNDS):
        action = act(actor, seen, "explore")
        outcome_now = env.step(action)
        seen = outcome_now.observation
        now = rows(fields, seen)
        now["action"][:], now["reward"][:] = action, outcome_now.reward
        now["done"][:] = outcome_now.episode_end
        now["truncated"][:] = outcome_now.truncated
        joined = {name: joined_rows(before[name], now[name]) for name in now}
        empty = map_leaves(lambda leaf: leaf[:0], seen)
        joined["final_observation"] = outcome_now.final_observation or empty
        joined["env_index"] = np.tile(np.arange(ENVS), (2, 1))
        joined["rollout_index"] = np.full((2, ENVS), number)
        replay.insert(joined, agent=0)
        before = now
        for update in range(UPDATES if number > 10 else 0):
            batch = transitions_of(replay.sample(BATCH))
            step.update(replace(batch, env_steps=0 if update else ENVS))
    return solved(actor)


def rows(fields: Any, seen: Any) -> dict[str, Any]:
    """One row [ENVS, ...] of a rollout, zeros but for the observation."""
    zeros = {
        name: map_leaves(lambda spec: np.zeros(spec.shape[1:], spec.dtype), nest)
        for name, nest in fields.items()
        if name != "initial_agent_state"
    }
    return zeros | {"observation": seen}


def joined_rows(before: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return {name: joined_rows(before[name], now[name]) for name in now}
    return np.stack([before, now])


@pytest.mark.long
def test_hindsight_solves_what_plain_replay_does_not() -> None:
    assert learnt(hindsight_share=0.8) > 0.9
    assert learnt(hindsight_share=0.0) < 0.3
