# SPDX-License-Identifier: Apache-2.0
"""MonoBeast: distributed training on one machine, in pure Python and PyTorch.

python -m torchbeast.monobeast --preset pong
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import ExitStack, closing

from torchbeast.cli import command_line
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.contract import LearnerInfo
from torchbeast.collect.source import FleetSource, process_source
from torchbeast.collect.weights import SharedWeights, ring_size
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.checks import counted
from torchbeast.envs.env_process import EnvProcess
from torchbeast.errors import EXIT_DONE
from torchbeast.fleets.supervisor import end_program
from torchbeast.fleets.system import check_alone
from torchbeast.fleets.waiting import say
from torchbeast.reporting.diagnosis import RunFacts
from torchbeast.reporting.run_folder import Session, session
from torchbeast.run.assemble import precision
from torchbeast.run.learner_run import DescribedEnv, LearnerRun

PROGRAM = "monobeast"
# As in MonoBeast 2019. PolyBeast has the deep network, as in 2019.
MODEL_FOR_IMAGES = "shallow"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    return command_line.main(MonoBeastFlags, PROGRAM, argv, run)


def run(flags: MonoBeastFlags) -> int:
    """Trains or evaluates, depending on --mode."""
    check_alone(PROGRAM)
    if flags.command.mode != "train":
        return flags.test_run(flags.environment.asked)
    num_envs = flags.processes.environments()  # recorded, so that a resumed run keeps it
    processes = dataclasses.replace(flags.processes, num_envs=num_envs)
    flags = dataclasses.replace(flags, processes=processes)
    with session(flags.run.folder, command_line.flatten(flags)) as opened, ExitStack() as ending:
        workers = counted(processes.processes(), "worker")
        say(f"{counted(num_envs, 'environment')} in {workers}.")
        train(flags, opened, ending)
    return EXIT_DONE


def train(flags: MonoBeastFlags, opened: Session, ending: ExitStack) -> None:
    """Trains until the run ends; `ending` then ends the worker processes."""
    spec = flags.environment.spec
    with closing(EnvProcess(spec, 1, check_goes_on=opened.supervisor.check_goes_on)) as env:
        spaces = env.observation_space, env.action_space, env.frame_stack

    def source(learner: LearnerInfo[SharedWeights]) -> FleetSource:
        acting = precision(flags.hardware, flags.is_reproducible)
        on_demand = flags.synchronous_rollouts > 0
        return process_source(learner, spec, acting, flags.processes, on_demand, ending)

    facts = RunFacts(
        program=PROGRAM,
        num_envs=flags.processes.environments(),
        processes=flags.processes.processes(),
        fixed_lag=flags.processes.fixed_lag,
    )
    settings = flags.run_settings(spec.name, facts)
    described = DescribedEnv(env=spec, observation_space=spaces[0])
    weights = functools.partial(SharedWeights, size=ring_size(flags.processes.fixed_lag))
    run = LearnerRun(settings, described, opened)
    run.train(lambda spec: make_agent(spec, *spaces, MODEL_FOR_IMAGES), weights, source)


if __name__ == "__main__":
    end_program(main())
