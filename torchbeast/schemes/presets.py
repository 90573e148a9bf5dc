# SPDX-License-Identifier: Apache-2.0
"""Named architectures: the ways to spread the work that have a name, as settings of a Scheme.

docs/schemes.md describes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchbeast.core.actors.registry import (
    ActorFactory,
    OffPolicyActorCritic,
    OnPolicyActorCritic,
)
from torchbeast.core.algos.base import AlgoFactory
from torchbeast.core.algos.dqn import DQN
from torchbeast.core.algos.impala import Impala
from torchbeast.core.algos.laser import Laser
from torchbeast.core.algos.ppo import PPO
from torchbeast.core.algos.sac import SAC
from torchbeast.core.envs.vec_env import VecEnvFactory
from torchbeast.core.storages.storage import (
    OnPolicyGAEBuffer,
    OnPolicyVTraceBuffer,
    ReplayBuffer,
    Storage,
)


class Preset(NamedTuple):
    """A named architecture: the components that it has unless others are given, and its axes."""

    sentence: str
    algo: Callable[[], AlgoFactory]
    storage: Callable[[], Storage]
    axes: Mapping[str, Any]
    actor: Callable[..., ActorFactory] = OnPolicyActorCritic.create_factory


def _a2c() -> AlgoFactory:
    """PPO that learns once from each batch, whole, is A2C: all its ratios are 1."""
    return PPO.create_factory(
        num_epochs=1,
        num_mini_batch=1,
        normalise_advantages=False,
        optimiser="rmsprop",
        lr=7e-4,
        max_grad_norm=0.5,
    )


def _ppo() -> AlgoFactory:
    """With few environments there are few batches, so PPO takes many steps on each."""
    return PPO.create_factory(num_epochs=10, lr=1e-3, max_grad_norm=0.5)


def _prioritised() -> ReplayBuffer:
    return ReplayBuffer.create_factory(
        replay_ratio=math.inf, n_step=3, priority_exponent=0.6, priority_beta=0.4
    )


_HERE = {"col_remote_workers": 0, "col_communication": "synchronous"}
_WORKERS = {"col_remote_workers": 2, "col_communication": "asynchronous"}

PRESETS = {
    "a2c": Preset(
        "Advantage actor-critic: one optimiser step for each batch, in one process.",
        _a2c,
        lambda: OnPolicyGAEBuffer.create_factory(size=5, gae_lambda=1.0),
        _HERE,
    ),
    "ppo": Preset(
        "Proximal policy optimisation: several epochs on each batch, in one process.",
        _ppo,
        lambda: OnPolicyGAEBuffer.create_factory(size=128),
        _HERE,
    ),
    "a3c": Preset(
        "A2C in several workers, whose gradients are applied as they come.",
        _a2c,
        lambda: OnPolicyGAEBuffer.create_factory(size=5, gae_lambda=1.0),
        {**_HERE, "grad_remote_workers": 2, "grad_communication": "asynchronous"},
    ),
    "dppo": Preset(
        "PPO in several workers, whose gradients are one step of the learner's process.",
        _ppo,
        lambda: OnPolicyGAEBuffer.create_factory(size=128),
        {**_HERE, "grad_remote_workers": 2},
    ),
    "dd-ppo": Preset(
        "PPO in several workers, which join their gradients and each apply them, and do not wait "
        "for the slowest.",
        _ppo,
        lambda: OnPolicyGAEBuffer.create_factory(size=128),
        {
            **_HERE,
            "grad_remote_workers": 2,
            "update_execution": "decentralised",
            "sync_col_specs": {"fraction_workers": 0.6, "fraction_samples": 0.25},
        },
    ),
    "rapid": Preset(
        "DD-PPO whose workers have collecting workers of their own, which never wait.",
        _ppo,
        lambda: OnPolicyGAEBuffer.create_factory(size=128),
        {**_WORKERS, "grad_remote_workers": 2, "update_execution": "decentralised"},
    ),
    "impala": Preset(
        "Workers that never wait, and V-trace for the lag of their policies: MonoBeast's, and "
        'RayBeast\'s with col_backend="ray".',
        Impala.create_factory,
        lambda: OnPolicyVTraceBuffer.create_factory(size=20),
        _WORKERS,
    ),
    "seed": Preset(
        "IMPALA whose workers only step environments: actions are chosen in one place, for many of "
        "them at once. PolyBeast's.",
        Impala.create_factory,
        lambda: OnPolicyVTraceBuffer.create_factory(size=20),
        {**_WORKERS, "inference": "central"},
    ),
    "laser": Preset(
        "IMPALA that learns from a replay too.",
        Laser.create_factory,
        lambda: OnPolicyVTraceBuffer.create_factory(size=20, replay_size=100_000),
        _WORKERS,
    ),
    "dqn": Preset(
        "Double DQN from a replay of single steps, in one process.",
        DQN.create_factory,
        ReplayBuffer.create_factory,
        _HERE,
        OffPolicyActorCritic.create_factory,
    ),
    "sac": Preset(
        "Soft actor-critic from a replay of single steps, in one process.",
        SAC.create_factory,
        ReplayBuffer.create_factory,
        _HERE,
        OffPolicyActorCritic.create_factory,
    ),
    "ape-x": Preset(
        "DQN with a prioritised replay that workers fill; nobody waits for anybody.",
        DQN.create_factory,
        _prioritised,
        _WORKERS,
        OffPolicyActorCritic.create_factory,
    ),
}


def settings(name: str, train_envs_factory: VecEnvFactory) -> dict[str, Any]:
    """Returns the settings of a Scheme. Raises ValueError for an unknown name, and TypeError for
    anything but a factory of environments.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"no architecture {name!r}: use {', '.join(PRESETS)}")
    if not isinstance(train_envs_factory, VecEnvFactory):
        raise TypeError(
            "train_envs_factory must be the first result of VecEnv.create_factory(...), got "
            f"{train_envs_factory!r}"
        )
    preset, envs = PRESETS[name], train_envs_factory
    return {
        "train_envs_factory": envs,
        "actor_factory": preset.actor(envs.observation_space, envs.action_space),
        "algo_factory": preset.algo(),
        "storage_factory": preset.storage(),
        **preset.axes,
    }
