# SPDX-License-Identifier: Apache-2.0
"""Environments that raise when a masked action is taken, played by sources and evaluations."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import pytest
import torch
from compliance.source import Setup, take
from fleet_running import running_mono
from learners import impala, ppo
from local_running import running_local

from torchbeast import envs
from torchbeast.core.actors.contract import Actor
from torchbeast.core.actors.env_loop import EnvLoop
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.errors import RunError

E = 3
TAXI = max(name for name in gymnasium.registry if name.startswith("Taxi-v"))


def actor_in(env: VecEnv) -> Actor:
    torch.manual_seed(0)
    return make_agent(ActorSpec("mlp"), env.observation_space, env.action_space, 1).model


def loop_in(name: str, **options: Any) -> EnvLoop:
    env = envs.make(envs.EnvSpec(name, options=envs.EnvOptions(**options)), E)
    return EnvLoop(env, actor_in(env), seed=0)


@pytest.mark.parametrize("mode", ["sample", "greedy"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("masked:Masked", {}),
        ("masked:Several", {}),
        ("masked:InInfo", {"mask_actions": True}),
        ("masked:Undeclared", {"mask_actions": True}),
        (TAXI, {"mask_actions": True}),
    ],
)
def test_no_masked_action_is_taken(name: str, options: dict[str, Any], mode: Any) -> None:
    loop = loop_in(name, **options)
    for _ in range(40):
        mask = torch.from_numpy(loop.row.observation["action_mask"])[None]
        loop.act(mode)
        assert loop.acted.extras["policy_logits"].isneginf().eq(mask == 0).all()
        loop.step()


def test_without_its_mask_the_environment_raises() -> None:
    """Or the other tests would show nothing."""
    loop = loop_in("masked:Masked", observation_keys=("numbers",))
    with pytest.raises(RuntimeError, match="the masked action"):
        for _ in range(40):
            loop.act("sample")
            loop.step()


@pytest.mark.parametrize("running", [running_local, running_mono], ids=["local", "monobeast"])
def test_rollouts_have_masked_logits_and_are_learnt_from(running: Any) -> None:
    setup = Setup(env_id="masked:Masked", num_envs=4, batch_size=4, unroll_length=12)
    with running(setup) as run:
        for rollout in take(run, 3):
            assert not_taken(rollout)
        for make in (impala, ppo):
            actor = actor_in(envs.make("masked:Masked", 1))
            metrics = make(actor, reward_clipping="none").update(rollout).metrics
            assert math.isfinite(metrics["total_loss"]) and 0 < metrics["grad_norm"] < math.inf
            assert 0 < metrics["entropy"] <= math.log(2) + 1e-6
    assert run.supervisor.failure is None


def not_taken(rollout: Any) -> bool:
    """Returns whether no action of a rollout was masked, by its observations and its logits."""
    mask, taken = rollout.observation["action_mask"][:-1], rollout.action[1:].unsqueeze(-1)
    logits = rollout.extras["policy_logits"][1:]
    return bool(mask.gather(-1, taken).all() and logits.isneginf().eq(mask == 0).all())


def test_an_environment_that_allows_nothing_ends_the_run_with_a_sentence() -> None:
    loop = loop_in("masked:Nothing")
    with pytest.raises(RunError, match="action_mask of an environment forbids every action"):
        for _ in range(5):
            loop.act("sample")
            loop.step()


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Catch", {"mask_actions": True}, "Catch has no action masks"),
        ("CartPole-v1", {"mask_actions": True}, r"needs info\['action_mask'\] at every step"),
        (
            "Pendulum-v1",
            {"mask_actions": True},
            "Discrete or MultiDiscrete .* Pendulum-v1 has a Box",
        ),
        ("source_envs:Numbered", {"mask_actions": True}, "returns a VecEnv, which has no info"),
    ],
)
def test_masks_that_an_environment_does_not_give_are_refused(
    name: str, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(envs.EnvError, match=reason):
        envs.make(envs.EnvSpec(name, options=envs.EnvOptions(**options)), 1)


def test_selecting_observations_without_their_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="action_mask among the observation_keys, got image"):
        envs.EnvOptions(mask_actions=True, observation_keys=("image",))
