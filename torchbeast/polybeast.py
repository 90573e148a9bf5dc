# SPDX-License-Identifier: Apache-2.0
"""PolyBeast in one command: starts the environment servers, then trains on their data.

python -m torchbeast.polybeast --preset pong
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext

from torchbeast.cli import command_line
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.core.algos.config import with_values
from torchbeast.errors import EXIT_DONE
from torchbeast.fleets.supervisor import Supervisor, end_program
from torchbeast.fleets.system import check_alone
from torchbeast.reporting.run_folder import session
from torchbeast.servers.addresses import folder_basename, run_folder, server_addresses
from torchbeast.servers.env_servers import EnvServers, plans_for_local_servers

PROGRAM = "polybeast"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    return command_line.main(PolyBeastFlags, PROGRAM, argv, run)


def run(flags: PolyBeastFlags) -> int:
    """Trains or evaluates, depending on --mode."""
    check_alone(PROGRAM)
    if flags.command.mode != "train":
        return flags.test_run(flags.environment.asked)
    import libtorchbeast  # noqa: F401 - raises immediately if it was not built

    # recorded, so that a resumed run keeps it
    flags = with_values(flags, {"num_envs": flags.fleet.environments()})
    with (
        session(flags.run.folder, command_line.flatten(flags)) as opened,
        environment_servers(flags, opened.supervisor) as servers,
    ):
        # These import torch, while the servers start.
        from torchbeast.polybeast_learner import plan_of
        from torchbeast.run.learner_run import LearnerRun
        from torchbeast.servers.discovery import Asking, find_servers

        if servers.wait_ready():
            asking = Asking(60.0, None, opened.supervisor.check_goes_on)
            basename = servers.addresses[0].removesuffix(".0")
            fleet = find_servers([basename], flags.fleet.num_envs, asking)
            LearnerRun(plan_of(flags, fleet), opened).train()
    return EXIT_DONE


@contextmanager
def environment_servers(flags: PolyBeastFlags, supervisor: Supervisor) -> Iterator[EnvServers]:
    """Starts the servers of the run, and ends them when the run ends.

    Their sockets are in the run's folder, unless the user gave --pipes_basename.
    """
    plans = plans_for_local_servers(flags.fleet, flags.hardware.stays_on_cpu)
    basename = flags.fleet.pipes_basename or ""
    with nullcontext(None) if basename else run_folder() as folder:
        own = basename if folder is None else folder_basename(folder)
        addresses = server_addresses(own, len(plans))
        env = flags.environment.spec
        with closing(EnvServers(supervisor, env, plans, addresses, folder)) as servers:
            yield servers


if __name__ == "__main__":
    end_program(main())
