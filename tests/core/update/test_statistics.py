# SPDX-License-Identifier: Apache-2.0
"""Running statistics of observations: counted once a batch, by the learner alone, and carried
wherever the weights go.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fake_nethack import FakeNetHack
from learners import impala
from torch import Tensor

from torchbeast.collect.weights import PublishedWeights, SharedWeights
from torchbeast.core.actors.networks import MLPNet
from torchbeast.core.actors.registry import make_agent, make_model
from torchbeast.core.actors.running_norm import RunningNorm
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.config import DQNConfig, SACConfig, StepConfig, TD3Config
from torchbeast.core.algos.dqn import DQN
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.sac import SAC
from torchbeast.core.algos.td3 import TD3
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Box, Discrete
from torchbeast.core.envs.sync_vec_env import SyncVecEnv
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.storages.transition import Transitions
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep
from torchbeast.run.episodes import play

T, B, ACTIONS = 5, 4, 3
UNBOUNDED = ArraySpec((4,), "float32", -math.inf, math.inf)
SCALES = torch.tensor([1.0, 1e-3, 1e4, 1e6])
Make = Callable[..., Rollout]


@pytest.fixture
def make_wide(make_rollout: Make) -> Make:
    """Rollouts of observations with other scales in every entry."""

    def make(**settings: Any) -> Rollout:
        return make_rollout(T, B, observation=torch.randn(T + 1, B, 4) * SCALES + 5, **settings)

    return make


def learner(model: MLPNet | None = None, **settings: Any) -> OptimiserStep[Any]:
    return impala(model or MLPNet(UNBOUNDED, Discrete(ACTIONS), False), **settings)


def statistics(model: torch.nn.Module) -> dict[str, Tensor]:
    found = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert set(found) == {"scale.mean", "scale.variance", "scale.count"}
    return found


def seen_by(rollouts: list[Rollout]) -> np.ndarray:
    """Rows 1 to T of all rollouts: row 0 is the last row of the one before."""
    return np.concatenate([r.observation[1:].flatten(0, 1).double().numpy() for r in rollouts])


def test_every_row_is_counted_once(make_wide: Make) -> None:
    algorithm, rollouts = learner(), [make_wide() for _ in range(3)]
    for rollout in rollouts:
        algorithm.update(rollout)
    rows, found = seen_by(rollouts), statistics(algorithm.algo.actor)
    assert found["scale.count"] == 3 * T * B == len(rows)
    np.testing.assert_allclose(found["scale.mean"], rows.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found["scale.variance"], rows.var(0), rtol=1e-6)


def test_a_value_network_of_its_own_has_the_same_statistics(make_wide: Make) -> None:
    model = MLPNet(UNBOUNDED, Discrete(ACTIONS), False, shared_body=False)
    learner(model).update(make_wide())
    buffers = dict(model.named_buffers())
    counts = [int(value) for name, value in buffers.items() if name.endswith("scale.count")]
    means = [value for name, value in buffers.items() if name.endswith("scale.mean")]
    assert counts == [T * B] * 2
    torch.testing.assert_close(*means)


@pytest.mark.parametrize(
    ("kind", "config", "model", "actions", "count"),
    [
        (DQN, DQNConfig(target_period=1, reward_clipping="none"), "q-mlp", Discrete(ACTIONS), 2),
        (SAC, SACConfig(reward_clipping="none"), "sac-mlp", Box(-1.0, 1.0, (2,)), 5),
        (
            TD3,
            TD3Config(policy_period=1, reward_clipping="none"),
            "td3-mlp",
            Box(-1.0, 1.0, (2,)),
            6,
        ),
    ],
)
def test_critics_and_target_networks_have_the_statistics_of_what_was_sampled(
    kind: Any, config: Any, model: str, actions: Any, count: int
) -> None:
    actor = make_model(ActorSpec(model), UNBOUNDED, actions)
    step = OptimiserStep(kind(actor, config), StepConfig(), total_steps=100)
    seen = torch.randn(32, 4) * SCALES + 5
    step.update(
        Transitions(
            observation=seen,
            action=actor.distribution.zero_action((1, 32))[0],
            reward=torch.ones(32),
            terminated=torch.zeros(32, dtype=torch.bool),
            next_observation=seen + 1,
            env_steps=32,
        )
    )
    models = torch.nn.ModuleDict(step.algo.models).modules()
    norms = [module for module in models if isinstance(module, RunningNorm)]
    assert len(norms) == count
    for norm in norms:
        assert norm.count == 32
        np.testing.assert_allclose(norm.mean, seen.double().mean(0), rtol=1e-6)


def test_a_batch_counts_before_it_is_learnt_from(make_wide: Make) -> None:
    rollout, seen = make_wide(), []

    class Looking(IMPALA):
        def losses(self, minibatch: Rollout) -> Losses:
            seen.append(statistics(self.actor))
            return super().losses(minibatch)

    model = MLPNet(UNBOUNDED, Discrete(ACTIONS), False)
    impala(model, Looking).update(rollout)
    np.testing.assert_allclose(seen[0]["scale.mean"], seen_by([rollout]).mean(0), rtol=1e-6)
    torch.testing.assert_close(seen[0], statistics(model), rtol=0, atol=0)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_slices_of_a_batch_are_learnt_with_the_statistics_of_all(
    make_wide: Make, num_threads: int
) -> None:
    rollout, whole = make_wide(), learner()
    model = copy.deepcopy(whole.algo.actor)
    slices = learner(model, bytes_at_once=1, num_threads=num_threads)
    assert slices.update(rollout).metrics == pytest.approx(whole.update(rollout).metrics, rel=1e-4)
    torch.testing.assert_close(statistics(model), statistics(whole.algo.actor), rtol=0, atol=0)
    for name, parameter in whole.algo.actor.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_statistics_are_as_before_when_an_update_fails(make_wide: Make, bad: float) -> None:
    algorithm = learner()
    algorithm.update(make_wide())
    before, rollout = statistics(algorithm.algo.actor), make_wide()
    rollout.observation[2, 1, 3] = bad
    with pytest.raises(NonFiniteError):
        algorithm.update(rollout)
    torch.testing.assert_close(statistics(algorithm.algo.actor), before, rtol=0, atol=0)
    algorithm.update(make_wide())


def test_statistics_go_to_who_acts_with_the_weights(make_wide: Make) -> None:
    algorithm = learner()
    model = algorithm.algo.actor
    for ring in (PublishedWeights(model), SharedWeights(model)):
        replica = copy.deepcopy(model)
        algorithm.update(make_wide())
        ring.publish(model, algorithm.version)
        ring.refresh(replica, None)
        torch.testing.assert_close(statistics(replica), statistics(model), rtol=0, atol=0)


def test_a_resumed_run_goes_on_counting(make_wide: Make) -> None:
    first, second = make_wide(), make_wide()
    whole = learner()
    whole.update(first)
    resumed = learner()
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    for algorithm in (whole, resumed):
        algorithm.update(second)
    torch.testing.assert_close(statistics(resumed.algo.actor), statistics(whole.algo.actor))


def test_playing_changes_no_statistics() -> None:
    env = SyncVecEnv([FakeNetHack] * 2, "FakeNetHack")
    agent = make_agent(ActorSpec("auto"), env.observation_space, env.action_space, 1)
    before = copy.deepcopy(agent.model.state_dict())
    assert play(env, agent, 2, seed=0).returns
    torch.testing.assert_close(agent.model.state_dict(), before, rtol=0, atol=0)


def test_statistics_of_nethack_do_not_blow_up_the_loss(make_rollout: Make) -> None:
    env = SyncVecEnv([FakeNetHack] * B, "FakeNetHack")
    agent = make_agent(ActorSpec("auto"), env.observation_space, env.action_space, 1)
    rows = [env.reset(0)]
    rows += [env.step(np.zeros(B, np.int64)).observation for _ in range(T)]
    observation = {
        name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]
    }
    rollout = make_rollout(
        T,
        B,
        observation=observation,
        action=torch.randint(23, (T + 1, B)),
        extras={"policy_logits": torch.zeros(T + 1, B, 23)},
        final_observation={name: leaf[0, :0] for name, leaf in observation.items()},
    )
    algorithm = impala(agent.model, reward_clipping="none")
    for _ in range(3):
        assert abs(algorithm.update(rollout).metrics["total_loss"]) < 10 * T * B
