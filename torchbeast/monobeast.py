# SPDX-License-Identifier: Apache-2.0
"""MonoBeast: distributed training on one machine, in pure Python and PyTorch.

python -m torchbeast.monobeast --preset pong
"""

from __future__ import annotations

from collections.abc import Sequence

from torchbeast.cli import command_line
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.source import FleetCollection, local_fleet
from torchbeast.core.algos.config import with_values
from torchbeast.core.base.checks import counted
from torchbeast.envs.env_process import spaces_of
from torchbeast.errors import EXIT_DONE
from torchbeast.fleets.supervisor import end_program
from torchbeast.fleets.system import check_alone
from torchbeast.fleets.waiting import say
from torchbeast.reporting.run_folder import session
from torchbeast.run.learner_run import LearnerRun

PROGRAM = "monobeast"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    return command_line.main(MonoBeastFlags, PROGRAM, argv, run)


def run(flags: MonoBeastFlags) -> int:
    """Trains or evaluates, depending on --mode."""
    check_alone(PROGRAM)
    if flags.command.mode != "train":
        return flags.test_run(flags.environment.asked)
    # recorded, so that a resumed run keeps it
    flags = with_values(flags, {"num_envs": flags.processes.environments()})
    processes = flags.processes
    with session(flags.run.folder, command_line.flatten(flags)) as opened:
        env = flags.environment.spec
        spaces = spaces_of(env, opened.supervisor.check_goes_on)
        workers = counted(processes.processes(), "worker")
        say(f"{counted(processes.environments(), 'environment')} in {workers}.")
        collection = FleetCollection(
            num_envs=processes.environments(),
            processes=processes.processes(),
            fixed_lag=processes.fixed_lag,
            actors=processes,
            make_fleet=local_fleet,
            on_demand=flags.synchronous_rollouts > 0,
        )
        LearnerRun(flags.plan(PROGRAM, env, spaces, collection), opened).train()
    return EXIT_DONE


if __name__ == "__main__":
    end_program(main())
