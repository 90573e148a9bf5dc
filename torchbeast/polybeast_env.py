# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's environment servers alone, for a learner in another terminal or on another machine.

python -m torchbeast.polybeast_env --num_servers 10
python -m torchbeast.polybeast_env --listen 0.0.0.0:50051 --tls_cert FILE --tls_key FILE \\
    --token_file FILE
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Sequence

from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastEnvFlags
from torchbeast.errors import EXIT_DONE, exit_code_of
from torchbeast.learning.session import raise_failure
from torchbeast.processes.supervisor import Supervisor
from torchbeast.processes.torchrun import check_alone
from torchbeast.reporting.run_folder import LOGGER_NAME, warning_handler
from torchbeast.sources.servers.addresses import server_addresses, user_basename
from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.servers.env_servers import EnvServers
from torchbeast.sources.servers.hosts import check_free, shown_to_learners
from torchbeast.sources.servers.plan import spread

PROGRAM = "polybeast_env"
_POLL_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if stopped, 1 if it failed, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(PolyBeastEnvFlags, PROGRAM, argv)))


def run(flags: PolyBeastEnvFlags) -> int:
    """Serves until Ctrl-C, SIGTERM, or a failure that a new server process cannot fix."""
    check_alone(PROGRAM)
    logging.getLogger(LOGGER_NAME).addHandler(warning_handler())
    count = flags.servers.num_servers
    plans = spread(flags.servers.num_actors or count, count)
    addresses = server_addresses(
        flags.servers.listen or flags.servers.pipes_basename or user_basename(), count
    )
    security = flags.security if flags.servers.listen else None
    if security is not None:
        _check_other_machines_can_be_served(addresses, security)
    supervisor = Supervisor()
    with supervisor.signals():
        servers = EnvServers(
            supervisor, flags.environment.spec, plans, addresses, security=security
        )
        try:
            if servers.wait_ready():
                print(_serving(flags, addresses, sum(p.num_envs for p in plans)), flush=True)
            while not supervisor.wait(_POLL_S):
                pass
        finally:
            servers.close()
    raise_failure(supervisor.failure)
    return EXIT_DONE


def _check_other_machines_can_be_served(
    addresses: Sequence[str], security: ServerSecurityConfig
) -> None:
    """Raises UsageError for a port that is in use and for files that cannot be used."""
    from torchbeast.sources.servers.credentials import server_credentials

    check_free(addresses)
    server_credentials(security)


def _serving(flags: PolyBeastEnvFlags, addresses: Sequence[str], num_envs: int) -> str:
    """Describes what is served, with the command that learns from it."""
    first, last = addresses[0], addresses[-1]
    where = first if first == last else f"{first} to {last}"
    return (
        f"Serving {num_envs} environments of {flags.environment.env_id} at {where}; Ctrl-C ends it."
        f"\nLearn from them: python -m torchbeast.polybeast_learner{_flags_of_learner(flags)}"
    )


def _flags_of_learner(flags: PolyBeastEnvFlags) -> str:
    """Returns the flags with which a learner finds these servers; names in capitals are its own."""
    basename, security = flags.servers.pipes_basename, flags.security
    if basename:
        return f" --pipes_basename {shlex.quote(basename)}"
    if not flags.servers.listen:
        return ""
    words = [f" --env_servers {shown_to_learners(flags.servers.listen)}"]
    words += ["--tls_ca CA"] if security.has_tls else ["--insecure"]
    words += ["--tls_cert CERTIFICATE --tls_key KEY"] if security.tls_client_ca else []
    words += [f"--token_file {shlex.quote(security.token_file)}"] if security.token_file else []
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
