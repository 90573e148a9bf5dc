# SPDX-License-Identifier: Apache-2.0
"""PolyBeast's environment servers, for a learner in another terminal or on another machine.

python -m torchbeast.polybeast_env --num_servers 10
python -m torchbeast.polybeast_env --listen 0.0.0.0:50051 --tls_cert FILE --tls_key FILE \\
    --token_file FILE
python -m torchbeast.polybeast_env --learner HOST:PORT --tls_ca FILE --token_file FILE
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from contextlib import closing

from torchbeast.cli import command_line
from torchbeast.cli.flags import PolyBeastEnvFlags
from torchbeast.core.base.checks import command, counted, typed
from torchbeast.errors import EXIT_DONE, UsageError
from torchbeast.fleets.supervisor import Failure, Supervisor, end_program
from torchbeast.fleets.system import check_alone
from torchbeast.reporting.output import lossy_output
from torchbeast.reporting.prometheus import Metric, PrometheusEndpoint, total
from torchbeast.reporting.run_folder import LOGGER_NAME, raise_failure, warning_handler
from torchbeast.servers.addresses import server_addresses, user_basename
from torchbeast.servers.env_servers import EnvServers, ServerPlan, spread
from torchbeast.servers.security import credentials, flags_of_others

PROGRAM = "polybeast_env"
_POLL_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    return command_line.main(PolyBeastEnvFlags, PROGRAM, argv, run)


def run(flags: PolyBeastEnvFlags) -> int:
    """Serves until Ctrl-C, SIGTERM, the end of the run that it has joined, or a failure that
    replacing the server process does not fix.
    """
    check_alone(PROGRAM)
    with lossy_output():
        raise_failure(_serve(flags))
    return EXIT_DONE


def _serve(flags: PolyBeastEnvFlags) -> Failure | None:
    """Serves until the run ends; returns its failure, or None."""
    logging.getLogger(LOGGER_NAME).addHandler(warning_handler())
    plans = spread(flags.servers.environments(), flags.servers.servers())
    learners = flags.servers.learners()
    _check_enough_streams(plans, learners)
    supervisor = Supervisor()
    last: dict[str, str] = {}  # message about each learner

    def say(learner: str, sentence: str) -> None:
        if last.get(learner) != sentence:
            last[learner] = sentence
            print(sentence, flush=True)

    with supervisor.signals(), PrometheusEndpoint().served(flags.metrics) as endpoint:
        addresses, security = _addresses(flags), flags.protection
        if security is not None:
            credentials(security)  # refuses files that cannot be used
        env = flags.environment.spec
        servers = EnvServers(
            supervisor, env, plans, addresses, security=security, learners=learners, say=say
        )
        with closing(servers):
            if servers.wait_ready():
                print(_serving(flags, addresses, sum(p.num_envs for p in plans)), flush=True)
                servers.dial()
            while not supervisor.wait(_POLL_S):
                endpoint.show(_metrics(servers, plans))
    return supervisor.failure


def _addresses(flags: PolyBeastEnvFlags) -> list[str]:
    """Returns the servers' addresses, or names for servers that dial in."""
    served, count = flags.servers, flags.servers.servers()
    if served.learner is not None:
        return [f"server {i}" for i in range(count)]
    return server_addresses(served.listen or served.pipes_basename or user_basename(), count)


def _check_enough_streams(plans: Sequence[ServerPlan], learners: Sequence[str]) -> None:
    streams = sum(plan.num_streams for plan in plans)
    if streams < len(learners):
        raise UsageError(
            f"{len(learners)} learners need one stream of environments each, but these servers "
            f"have {counted(streams, 'stream')}: increase --num_servers or --num_envs"
        )


def _metrics(servers: EnvServers, plans: Sequence[ServerPlan]) -> list[Metric]:
    """Returns the metrics of all servers; docs/how-to/operations.md lists them."""
    activity = servers.activity().items()
    steps = {address: said.get("steps", 0) for address, said in activity}
    opened = {address: said.get("open_streams", 0) for address, said in activity}
    streams = {a: plan.num_streams for a, plan in zip(servers.addresses, plans, strict=True)}
    text = "Replacements of processes that died, since the program started."
    since = "since its process started"
    return [
        total("served_env_steps", f"Environment steps of a server, {since}.", steps, "server"),
        Metric("open_streams", "Open streams of a server.", opened, "server"),
        Metric("served_streams", "Streams that a learner opens to a server.", streams, "server"),
        total("replaced_servers", text, servers.replaced),
    ]


def _serving(flags: PolyBeastEnvFlags, addresses: Sequence[str], num_envs: int) -> str:
    """Describes the served environments, with the command for the learner."""
    what = f"Serving {counted(num_envs, f'{flags.environment.spec.name} environment')}"
    if flags.servers.learner is not None:
        return f"{what} to the learner at {flags.servers.learner}. Press Ctrl-C to stop."
    shown = addresses if len(addresses) <= 2 else [f"{addresses[0]}, ...", addresses[-1]]
    where = " and ".join(shown)
    learn = f"{command('polybeast_learner')}{_flags_of_learner(flags)}"
    return f"{what} on {where}. Press Ctrl-C to stop.\nStart a learner with: {learn}"


def _flags_of_learner(flags: PolyBeastEnvFlags) -> str:
    """Returns the flags that a learner needs to find these servers; see `flags_of_others`."""
    served, pool = flags.servers, flags.environment.selfplay
    words = [] if pool is None else typed("--selfplay", pool)
    if served.pipes_basename:
        words = [*words, *typed("--pipes_basename", served.pipes_basename)]
    said = shlex.join(words)
    if not served.pipes_basename and served.listen:
        said = f"{said} {flags_of_others('--env_servers', [served.listen], flags.security)}"
    return f" {said.strip()}" if said else ""


if __name__ == "__main__":
    end_program(main())
