# SPDX-License-Identifier: Apache-2.0
"""Named architectures: the ways to spread the work that have a name, as settings of a Scheme.

docs/explanation/schemes.md describes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from torchbeast.core.actors.registry import ActorFactory, OffPolicyActorCritic, OnPolicyActorCritic
from torchbeast.core.algos import DQN, IMPALA, LASER, PPO, R2D2, SAC, Algorithm
from torchbeast.core.algos.config import OTHER_NAMES, PPOConfig
from torchbeast.core.envs.vec_env import VecEnvFactory
from torchbeast.core.storages import storage as storages


class SchemePreset(NamedTuple):
    """A named architecture: the components that it has unless others are given, and its axes."""

    algo: type[Algorithm[Any]]
    hyperparameters: Mapping[str, Any]
    storage: storages.Storage
    axes: Mapping[str, Any] = {}
    actor: Callable[..., ActorFactory] = OnPolicyActorCritic.create_factory

    def settings(self, envs: VecEnvFactory, hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings of a Scheme; hyperparameters: in place of the architecture's own."""
        replaced = {*hyperparameters, *(OTHER_NAMES.get(key) for key in hyperparameters)}
        kept = {key: self.hyperparameters[key] for key in self.hyperparameters.keys() - replaced}
        of_storage = {setting.name for setting in fields(self.storage)}  # gae_lambda is of both
        of_both = {key: hyperparameters[key] for key in hyperparameters.keys() & of_storage}
        return {
            "train_envs_factory": envs,
            "actor_factory": self.actor(envs.observation_space, envs.action_space),
            "algo_factory": self.algo.create_factory(**kept, **hyperparameters),
            "storage_factory": replace(self.storage, **of_both),
            **self.axes,
        }


# PPO that learns once from each batch, whole, is A2C: all its ratios are 1.
_A2C = {
    "num_epochs": 1,
    "num_mini_batch": 1,
    "normalise_advantages": False,
    "optimiser": "rmsprop",
    "learning_rate": 7e-4,
}


_SHORT = storages.OnPolicyGAEBuffer.create_factory(size=5, gae_lambda=1.0)
_LONG = storages.OnPolicyGAEBuffer.create_factory(size=PPOConfig.usual["unroll_length"])
_VTRACE = storages.OnPolicyVTraceBuffer.create_factory(size=20)
_VTRACE_WITH_REPLAY = storages.OnPolicyVTraceBuffer.create_factory(size=20, replay_size=100_000)
_REPLAYED_ROLLOUTS = storages.RolloutReplayBuffer.create_factory()
_REPLAY = storages.ReplayBuffer.create_factory()
_PRIORITISED = storages.ReplayBuffer.create_factory(
    replay_ratio=math.inf, n_step=3, priority_exponent=0.6, priority_beta=0.4
)
_OFF_POLICY = OffPolicyActorCritic.create_factory
_RECURRENT = partial(OnPolicyActorCritic.create_factory, recurrent=True)

SIZES = {"n_steps", "num_steps", "unroll_length"}
"""Names that flags and other libraries give to the size of a storage."""

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
    "laser": SchemePreset(LASER, {}, _VTRACE_WITH_REPLAY, _COLLECTING),
    "r2d2": SchemePreset(R2D2, {}, _REPLAYED_ROLLOUTS, _COLLECTING, _RECURRENT),
    "dqn": SchemePreset(DQN, {}, _REPLAY, actor=_OFF_POLICY),
    "sac": SchemePreset(SAC, {}, _REPLAY, actor=_OFF_POLICY),
    "ape-x": SchemePreset(DQN, {}, _PRIORITISED, _COLLECTING, _OFF_POLICY),
}


def preset_of(name: str) -> SchemePreset:
    """Returns the architecture of a name in any case; raises ValueError for an unknown one."""
    if not isinstance(name, str) or (name := name.lower()) not in PRESETS:
        raise ValueError(f"unknown architecture {name!r}: use {', '.join(PRESETS)}")
    return PRESETS[name]
