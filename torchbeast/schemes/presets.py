# SPDX-License-Identifier: Apache-2.0
"""Named architectures: the ways to spread the work that have a name, as settings of a Scheme.

docs/explanation/schemes.md describes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchbeast.core.actors.registry import ActorFactory, OffPolicyActorCritic, OnPolicyActorCritic
from torchbeast.core.algos.base import Algorithm
from torchbeast.core.algos.config import OTHER_NAMES, PPOConfig
from torchbeast.core.algos.dqn import DQN
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.laser import LASER
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.algos.sac import SAC
from torchbeast.core.envs.vec_env import VecEnvFactory
from torchbeast.core.storages.storage import (
    OnPolicyGAEBuffer,
    OnPolicyVTraceBuffer,
    ReplayBuffer,
    Storage,
)


class SchemePreset(NamedTuple):
    """A named architecture: the components that it has unless others are given, and its axes."""

    algo: type[Algorithm[Any]]
    hyperparameters: Mapping[str, Any]
    storage: Callable[[], Storage]
    axes: Mapping[str, Any] = {}
    actor: Callable[..., ActorFactory] = OnPolicyActorCritic.create_factory


# PPO that learns once from each batch, whole, is A2C: all its ratios are 1.
_A2C = {
    "num_epochs": 1,
    "num_mini_batch": 1,
    "normalise_advantages": False,
    "optimiser": "rmsprop",
    "learning_rate": 7e-4,
}


def _prioritised() -> ReplayBuffer:
    return ReplayBuffer.create_factory(
        replay_ratio=math.inf, n_step=3, priority_exponent=0.6, priority_beta=0.4
    )


_SHORT = functools.partial(OnPolicyGAEBuffer.create_factory, size=5, gae_lambda=1.0)
_LONG = functools.partial(OnPolicyGAEBuffer.create_factory, size=PPOConfig.usual["unroll_length"])
_VTRACE = functools.partial(OnPolicyVTraceBuffer.create_factory, size=20)
_OFF_POLICY = OffPolicyActorCritic.create_factory

_SIZES = {"n_steps", "num_steps", "unroll_length"}  # names of flags and of other libraries

_COLLECTING = {"col_remote_workers": 2, "col_communication": "asynchronous"}
_LEARNING = {"grad_remote_workers": 2}
_JOINT = {**_LEARNING, "update_execution": "decentralised"}
_STRAGGLERS = {"fraction_workers": 0.6, "fraction_samples": 0.25}

PRESETS = {
    "a2c": SchemePreset(PPO, _A2C, _SHORT),
    "ppo": SchemePreset(PPO, {}, _LONG),
    "a3c": SchemePreset(PPO, _A2C, _SHORT, {**_LEARNING, "grad_communication": "asynchronous"}),
    "dppo": SchemePreset(PPO, {}, _LONG, _LEARNING),
    "dd-ppo": SchemePreset(PPO, {}, _LONG, {**_JOINT, "sync_col_specs": _STRAGGLERS}),
    "rapid": SchemePreset(PPO, {}, _LONG, {**_COLLECTING, **_JOINT}),
    "impala": SchemePreset(IMPALA, {}, _VTRACE, _COLLECTING),
    "seed": SchemePreset(IMPALA, {}, _VTRACE, {**_COLLECTING, "inference": "central"}),
    "laser": SchemePreset(LASER, {}, functools.partial(_VTRACE, replay_size=100_000), _COLLECTING),
    "dqn": SchemePreset(DQN, {}, ReplayBuffer.create_factory, actor=_OFF_POLICY),
    "sac": SchemePreset(SAC, {}, ReplayBuffer.create_factory, actor=_OFF_POLICY),
    "ape-x": SchemePreset(DQN, {}, _prioritised, _COLLECTING, _OFF_POLICY),
}


def settings(
    name: str, train_envs_factory: VecEnvFactory, hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the settings of a Scheme.

    hyperparameters: in place of the architecture's own. Raises ValueError for an unknown name, and
    TypeError for anything but a factory of environments, or an unknown hyperparameter.
    """
    if not isinstance(name, str) or (name := name.lower()) not in PRESETS:
        raise ValueError(f"unknown architecture {name!r}: use {', '.join(PRESETS)}")
    if not isinstance(train_envs_factory, VecEnvFactory):
        raise TypeError(
            "train_envs_factory must be make_vec(...), or the first result of "
            f"VecEnv.create_factory(...), got "
            f"{train_envs_factory!r}"
        )
    for size in {*hyperparameters} & _SIZES:
        raise TypeError(
            f"{size} is the size of the storage: pass storage_factory, for example "
            "OnPolicyGAEBuffer.create_factory(size=128)"
        )
    preset, envs = PRESETS[name], train_envs_factory
    given = {*hyperparameters, *(OTHER_NAMES.get(key) for key in hyperparameters)}
    kept = {key: value for key, value in preset.hyperparameters.items() if key not in given}
    return {
        "train_envs_factory": envs,
        "actor_factory": preset.actor(envs.observation_space, envs.action_space),
        "algo_factory": preset.algo.create_factory(**kept, **hyperparameters),
        "storage_factory": preset.storage(),
        **preset.axes,
    }
