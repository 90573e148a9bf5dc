# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's environment servers alone, for a learner in another terminal or on another machine.

python -m torchbeast.polybeast_env --num_servers 10
python -m torchbeast.polybeast_env --listen 0.0.0.0:50051 --tls_cert FILE --tls_key FILE \\
    --token_file FILE
python -m torchbeast.polybeast_env --learner HOST:PORT --tls_ca FILE --token_file FILE
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastEnvFlags
from torchbeast.core.wording import counted, typed
from torchbeast.errors import EXIT_DONE, exit_code_of
from torchbeast.learning.session import raise_failure
from torchbeast.processes.cores import check_alone
from torchbeast.processes.supervisor import Failure, Supervisor, end_program
from torchbeast.reporting.metrics import Metric, Metrics
from torchbeast.reporting.output import lossy_output
from torchbeast.reporting.run_folder import LOGGER_NAME, warning_handler
from torchbeast.sources.servers.addresses import (
    folder_basename,
    run_folder,
    server_addresses,
    socket_path,
    user_basename,
)
from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.servers.counted import total
from torchbeast.sources.servers.env_servers import EnvServers
from torchbeast.sources.servers.own_certificate import (
    check_times,
    flags_of_others,
    names_in,
    shown_to_others,
    warning_of_names,
)
from torchbeast.sources.servers.plan import ServerPlan, spread

if TYPE_CHECKING:
    from torchbeast.sources.tunnel.dialler import Dialler

PROGRAM = "polybeast_env"
_POLL_S = 1.0
_JOIN_S = 5.0  # for connections to the learner to end


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if stopped, 1 if it failed, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(PolyBeastEnvFlags, PROGRAM, argv)))


def run(flags: PolyBeastEnvFlags) -> int:
    """Serves until Ctrl-C, SIGTERM, or a failure that a new server process cannot fix."""
    check_alone(PROGRAM)
    with lossy_output():
        failure = _serve(flags)
    raise_failure(failure)
    return EXIT_DONE


def _serve(flags: PolyBeastEnvFlags) -> Failure | None:
    """Serves until the run ends; returns its failure, if it has one."""
    logging.getLogger(LOGGER_NAME).addHandler(warning_handler())
    plans = spread(flags.servers.environments(), flags.servers.servers())
    security = None if flags.servers.listen is None else flags.security.listening()
    supervisor = Supervisor()
    with (
        supervisor.signals(),
        _addresses(flags) as (addresses, folder),
        Metrics().served(flags.metrics) as metrics,
    ):
        if security is not None:
            _check_files(security)
        dialler = _dialler(flags, addresses)
        counts = flags.metrics.metrics_port is not None
        servers = EnvServers(
            supervisor, flags.environment.spec, plans, addresses, folder, security, counts
        )
        try:
            if servers.wait_ready():
                print(_serving(flags, addresses, sum(p.num_envs for p in plans)), flush=True)
                if dialler is not None:
                    _start_dialling(dialler, addresses, supervisor)
            while not supervisor.wait(_POLL_S):
                metrics.show(_metrics(servers, plans))
            supervisor.join(_JOIN_S)
        finally:
            servers.close()
    return supervisor.failure


@contextmanager
def _addresses(flags: PolyBeastEnvFlags) -> Iterator[tuple[list[str], Path | None]]:
    """Yields the servers' addresses, and the folder of this run if they are in one."""
    served, count = flags.servers, flags.servers.servers()
    if served.learner is None:
        named = served.listen or served.pipes_basename or user_basename()
        yield server_addresses(named, count), None
        return
    with run_folder() as folder:
        yield server_addresses(folder_basename(folder), count), folder


def _dialler(flags: PolyBeastEnvFlags, addresses: Sequence[str]) -> Dialler | None:
    """Returns what dials the learner of the flags; None if the learner connects."""
    if flags.servers.learner is None:
        return None
    from torchbeast.sources.tunnel.dialler import Dialler

    sockets = [str(socket_path(address)) for address in addresses]
    return Dialler(
        flags.servers.learner, sockets, flags.security_of_learner(), lambda s: print(s, flush=True)
    )


def _start_dialling(dialler: Dialler, addresses: Sequence[str], supervisor: Supervisor) -> None:
    """Dials until the supervisor ends the run; the servers are ready."""
    from torchbeast.sources.tunnel.fingerprint import fingerprint

    def dial() -> None:
        dialler.run(fingerprint(addresses, lambda: supervisor.ended))

    supervisor.on_close(dialler.stop)
    supervisor.start_thread("", dial)


def _metrics(servers: EnvServers, plans: Sequence[ServerPlan]) -> list[Metric]:
    """Returns the metrics of all servers; docs/operations.md lists them."""
    activity = servers.activity()
    streams = {
        address: float(plan.num_streams)
        for address, plan in zip(servers.addresses, plans, strict=True)
    }
    return [
        Metric(
            name="served_env_steps",
            help="Environment steps of a server, since its process started.",
            values=total(activity, "steps"),
            label="server",
            kind="counter",
        ),
        Metric(
            name="open_streams",
            help="Streams of a server whose environments exist now.",
            values=total(activity, "open_streams"),
            label="server",
        ),
        Metric(
            name="served_streams",
            help="Streams that a learner opens to a server.",
            values=streams,
            label="server",
        ),
        Metric(
            name="replaced_servers",
            help="Processes that took the place of one that died, since the program started.",
            values=float(servers.replaced),
            kind="counter",
        ),
    ]


def _check_files(security: ServerSecurityConfig) -> None:
    """Raises UsageError for files that cannot be used."""
    from torchbeast.sources.servers.credentials import server_credentials

    server_credentials(security)
    check_times(security)


def _serving(flags: PolyBeastEnvFlags, addresses: Sequence[str], num_envs: int) -> str:
    """Describes what is served, with the command that learns from it."""
    what = f"Serving {counted(num_envs, 'environment')} of {flags.environment.env_id}"
    if flags.servers.learner is not None:
        return f"{what} to the learner at {flags.servers.learner}; Ctrl-C ends it."
    first, last = addresses[0], addresses[-1]
    where = first if first == last else f"{first} to {last}"
    names = names_in(flags.security)
    lines = [
        f"{what} at {where}; Ctrl-C ends it.",
        f"Learn from them: python -m torchbeast.polybeast_learner{_flags_of_learner(flags, names)}",
    ]
    if flags.servers.listen and (warning := warning_of_names(flags.servers.listen, names)):
        lines.append(warning)
    return "\n".join(lines)


def _flags_of_learner(flags: PolyBeastEnvFlags, names: Sequence[str]) -> str:
    """Returns the flags with which a learner finds these servers; see `flags_of_others`.

    names: in the certificate.
    """
    basename = flags.servers.pipes_basename
    if basename:
        return f" {shlex.join(typed('--pipes_basename', basename))}"
    if not flags.servers.listen:
        return ""
    reached = shown_to_others(flags.servers.listen, names)
    return f" --env_servers {reached} {flags_of_others(flags.security)}"


if __name__ == "__main__":
    end_program(main())
