# SPDX-License-Identifier: Apache-2.0
"""Small schemes for the tests of Learner."""

from __future__ import annotations

from typing import Any

from torchbeast.core.actors import OnPolicyActorCritic, get_feature_extractor
from torchbeast.core.algos import IMPALA, PPO
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import OnPolicyGAEBuffer, OnPolicyVTraceBuffer
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
