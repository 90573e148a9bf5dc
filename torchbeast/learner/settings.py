# SPDX-License-Identifier: Apache-2.0
"""Converts a scheme to the settings of a run, which a program with the same flags would have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchbeast.core.algos.base import recorded
from torchbeast.core.algos.registry import name_of
from torchbeast.core.envs.spaces import num_bytes
from torchbeast.core.specs import ModelConfig
from torchbeast.envs.spec import EnvSpec
from torchbeast.learning.assemble import CPU_BYTES_AT_ONCE, LearnerConfig
from torchbeast.learning.collection import replay_of
from torchbeast.learning.config import CheckpointConfig, HardwareConfig, TrainingConfig
from torchbeast.learning.learner_run import RunSettings
from torchbeast.reporting.diagnosis import Collection
from torchbeast.reporting.log_files import Logger
from torchbeast.reporting.loggers import DisplayConfig
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.schemes.scheme import Scheme


def run_settings(
    scheme: Scheme, env: EnvSpec, run: RunConfig, total_steps: int, loggers: Sequence[Logger]
) -> RunSettings:
    """Returns the settings of a run of total_steps."""
    learner = _learner_config(scheme, env, total_steps)
    return RunSettings(
        run=run,
        checkpoints=CheckpointConfig(),
        display=DisplayConfig(),
        learner=learner,
        collection=Collection(
            program="polybeast" if scheme.inference == "central" else "monobeast",
            num_actors=scheme.num_envs,
            processes=max(1, scheme.col_remote_workers),
            fixed_lag=0 if scheme.is_synchronous else None,
        ),
        recorded=_recorded(scheme, run, learner),
        loggers=loggers,
        replay=replay_of(scheme.replay),
        becomes_latest=False,  # its folder is the user's, who may keep other things beside it
    )


def _learner_config(scheme: Scheme, env: EnvSpec, total_steps: int) -> LearnerConfig:
    algo = scheme.algo
    return LearnerConfig(
        actor=scheme.actor_factory.spec,
        algo=algo.algo,
        algorithm=algo.config,
        step=algo.step,
        total_steps=total_steps,
        rollouts=scheme.rollouts,
        hardware=_hardware(scheme),
        replay=scheme.replay,
        transitions=scheme.transitions,
        synchronous_rollouts=scheme.synchronous_rollouts,
        reproducible=scheme.col_remote_workers > 0 and scheme.is_synchronous,
    ).in_environment(env.name)


def _hardware(scheme: Scheme) -> HardwareConfig:
    """Returns the use of this machine. The thread that calls `step` is the only one that learns;
    several would mostly wait for each other in operations on a batch of a single slice.
    """
    rows = 2 if scheme.learns_from_transitions else scheme.rollouts.unroll_length + 1
    size = num_bytes(scheme.train_envs_factory.observation_space) * rows
    return HardwareConfig(
        num_learner_threads=1,
        torch_threads=1 if scheme.rollouts.batch_size * size <= CPU_BYTES_AT_ONCE else None,
        disable_cuda=scheme.local_device == "cpu",
    )


def _recorded(scheme: Scheme, run: RunConfig, learner: LearnerConfig) -> dict[str, Any]:
    """Returns the settings by the names of a program's flags."""
    network = learner.actor
    parts = [
        run,
        learner.algorithm,
        learner.step,
        learner.rollouts,
        learner.hardware,
        learner.replay,
        learner.transitions,
        TrainingConfig(total_steps=learner.total_steps),
        ModelConfig(
            model=network.name, model_kwargs=dict(network.kwargs), use_lstm=network.use_lstm
        ),
        scheme.collecting,
    ]
    flags = {name: value for part in parts for name, value in recorded(part).items()}
    return {**flags, "algo": name_of(learner.algo)}
