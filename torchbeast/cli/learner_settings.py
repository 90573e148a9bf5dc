# SPDX-License-Identifier: Apache-2.0
"""Converts the flags of a learner program to the settings of its run."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from torchbeast.cli.command_line import flatten
from torchbeast.cli.learner_flags import LearnerFlags
from torchbeast.core.algos.registry import DEFAULT, find
from torchbeast.core.base.specs import ModelConfig
from torchbeast.envs.spec import EnvSpec
from torchbeast.reporting.diagnosis import Collection
from torchbeast.run.assemble import LearnerConfig
from torchbeast.run.checkpoint import FoundCheckpoint, actor_spec
from torchbeast.run.earlier_run import EarlierRun
from torchbeast.run.learner_run import RunSettings


def run_settings(flags: LearnerFlags, env_id: str, collection: Collection) -> RunSettings:
    """Returns the settings of a run in this environment."""
    learner = learner_config(flags, env_id)
    return RunSettings(
        run=flags.run,
        checkpoints=flags.checkpoints,
        display=flags.display,
        learner=learner,
        collection=collection,
        recorded={**flatten(flags), **flatten(learner.algorithm)},
        loggers=flags.logs.loggers(),
        metrics=flags.metrics,
    )


def learner_config(flags: LearnerFlags, env_id: str) -> LearnerConfig:
    """Returns the settings of a learner for this environment."""
    return LearnerConfig(
        actor=flags.model.spec,
        algo=find(flags.defaults.algo),
        algorithm=flags.algorithm,
        step=flags.step,
        total_steps=flags.training.total_steps,
        rollouts=flags.rollouts,
        replay=flags.replay,
        transitions=flags.transitions,
        hardware=flags.hardware,
        synchronous_rollouts=flags.synchronous_rollouts,
        reproducible=flags.is_reproducible,
    ).in_environment(env_id)


def test_run(flags: LearnerFlags, asked: EnvSpec) -> int:
    """Evaluates the checkpoints of the run that the flags name; returns the exit code.

    Raises UsageError if they name another network or algorithm than the run has.
    """
    from torchbeast.evaluation.following import follow
    from torchbeast.evaluation.play import NEEDED, test

    folder, config, seed = flags.run.folder, flags.evaluation, flags.run.seed
    if config.follow:
        check = functools.partial(_check_typed, flags)
        return follow(folder, config, asked, seed=seed or 0, check=check)
    path = folder / config.checkpoint
    earlier = EarlierRun.newest(path, NEEDED)
    earlier.check_same_algorithm(flags.defaults.algo)
    earlier.check_same_model(earlier.actor(flags.model.spec))
    film = flags.command.mode == "test_render"
    return test(folder, config, asked, seed=seed, film=film)


def _check_typed(flags: LearnerFlags, saved: dict[str, Any], path: Path) -> None:
    """Raises UsageError like `test_run`; default values stand for the run's own values."""
    earlier, known = EarlierRun(FoundCheckpoint(saved, path)), actor_spec(saved)
    if flags.defaults.algo != DEFAULT:
        earlier.check_same_algorithm(flags.defaults.algo)
    typed, usual = flags.model.spec, ModelConfig().spec
    wanted = {name: getattr(typed, name) for name in ("name", "kwargs", "use_lstm")}
    changed = {name: value for name, value in wanted.items() if value != getattr(usual, name)}
    earlier.check_same_model(dataclasses.replace(known, **changed))
