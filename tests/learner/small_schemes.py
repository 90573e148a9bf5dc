# SPDX-License-Identifier: Apache-2.0
"""Small schemes for the tests of Learner."""

from __future__ import annotations

from typing import Any

from torchbeast.core.actors import OffPolicyActorCritic, OnPolicyActorCritic, get_feature_extractor
from torchbeast.core.algos import DQN, IMPALA, PPO
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import OnPolicyGAEBuffer, OnPolicyVTraceBuffer, ReplayBuffer
from torchbeast.envs import make
from torchbeast.schemes import Scheme

CATCH = {"env_fn": make, "env_kwargs": {"env": "Catch"}, "vec_env_size": 2}
SMALL = {"hidden": 16}


def scheme_of(
    envs: dict[str, Any] = CATCH,
    algo: Any = None,
    storage: Any = None,
    recurrent: bool = False,
    **axes: Any,
) -> Scheme:
    """Returns a scheme of 2 environments per worker and batches of 10 steps of each; PPO."""
    factory, action_space, obs_space = VecEnv.create_factory(**envs)
    mlp = get_feature_extractor("MLP")
    return Scheme(
        train_envs_factory=factory,
        algo_factory=algo or PPO.create_factory(num_epochs=1, num_mini_batch=2),
        actor_factory=OnPolicyActorCritic.create_factory(
            obs_space, action_space, mlp, SMALL, recurrent
        ),
        storage_factory=storage or OnPolicyGAEBuffer.create_factory(size=10),
        **axes,
    )


def impala_of(**axes: Any) -> Scheme:
    """Returns a scheme of IMPALA."""
    storage = OnPolicyVTraceBuffer.create_factory(size=10)
    return scheme_of(algo=IMPALA.create_factory(), storage=storage, **axes)


def replay_of(**settings: Any) -> ReplayBuffer:
    """Returns a replay of 2000 steps that is learnt from, 16 at a time, once it has 40."""
    small = {"size": 2000, "batch_size": 16, "learn_start": 40}
    return ReplayBuffer.create_factory(**{**small, **settings})


def off_policy_of(
    envs: dict[str, Any] = CATCH, algo: Any = None, storage: Any = None, **axes: Any
) -> Scheme:
    """Returns a scheme of 2 environments per worker and a small replay; DQN."""
    factory, action_space, obs_space = VecEnv.create_factory(**envs)
    return Scheme(
        train_envs_factory=factory,
        algo_factory=algo or DQN.create_factory(lr=1e-3),
        actor_factory=OffPolicyActorCritic.create_factory(
            obs_space, action_space, get_feature_extractor("MLP"), SMALL
        ),
        storage_factory=storage or replay_of(),
        **axes,
    )
