# SPDX-License-Identifier: Apache-2.0
"""Converts a learner program's flags to the Configs of the parts of its run."""

from __future__ import annotations

import dataclasses

from torchbeast.cli.command_line import flatten
from torchbeast.cli.flags import LearnerFlags
from torchbeast.core.algos.impala import ImpalaConfig
from torchbeast.core.algos.optimiser_step import StepConfig
from torchbeast.core.algos.rmsprop import RMSpropConfig
from torchbeast.envs.spec import EnvSpec
from torchbeast.evaluation.testing import test
from torchbeast.learning.assemble import LearnerConfig
from torchbeast.learning.learner_run import RunSettings
from torchbeast.learning.reward_clipping import resolved
from torchbeast.reporting.diagnosis import Collection


def run_settings(
    flags: LearnerFlags, env_id: str, collection: Collection, reproducible: bool = False
) -> RunSettings:
    """Returns the settings of a run in this environment."""
    learner = learner_config(flags, env_id, reproducible)
    decided = {"reward_clipping": learner.algorithm.reward_clipping}
    return RunSettings(
        run=flags.run,
        checkpoints=flags.checkpoints,
        learner=learner,
        collection=collection,
        recorded={**flatten(flags), **decided},
    )


def learner_config(flags: LearnerFlags, env_id: str, reproducible: bool = False) -> LearnerConfig:
    """Returns the settings of a learner for this environment."""
    learning, optimiser = flags.learning, flags.optimiser
    clipping = resolved(learning.reward_clipping, env_id)
    algorithm = ImpalaConfig(
        discounting=learning.discounting,
        entropy_cost=learning.entropy_cost,
        baseline_cost=learning.baseline_cost,
        reward_scale=learning.reward_scale,
        reward_clipping=clipping,
        optimiser=RMSpropConfig(
            learning_rate=optimiser.learning_rate,
            alpha=optimiser.alpha,
            momentum=optimiser.momentum,
            epsilon=optimiser.epsilon,
        ),
    )
    return LearnerConfig(
        actor=dataclasses.replace(flags.model.spec, reward_input=clipping),
        algorithm=algorithm,
        step=StepConfig(
            warmup_steps=optimiser.warmup_steps, grad_norm_clipping=optimiser.grad_norm_clipping
        ),
        total_steps=learning.total_steps,
        rollouts=flags.rollouts,
        hardware=flags.hardware,
        reproducible=reproducible,
    )


def test_run(flags: LearnerFlags, asked: EnvSpec) -> int:
    """Evaluates the checkpoint of the run; returns the exit code."""
    film = flags.command.mode == "test_render"
    return test(flags.run.folder, flags.evaluation, asked, seed=flags.run.seed, film=film)
