# SPDX-License-Identifier: Apache-2.0
"""Shows the environments of environment servers, and their load.

python -m torchbeast.status                                        this user's servers, this machine
python -m torchbeast.status HOST:PORT ... --tls_ca FILE --token_file FILE  other machines
python -m torchbeast.status --learner HOST:PORT --tls_ca FILE --token_file FILE
                                                                   hosts that dial in to a learner
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from torchbeast.cli import command_line
from torchbeast.core.base.checks import Settings, above, require, setting
from torchbeast.errors import EXIT_DONE, EXIT_FAILURE, RunError
from torchbeast.servers.addresses import hosts, server_addresses, user_basename
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.security import silence_grpc

if TYPE_CHECKING:  # compiled; `main` reports its absence
    from torchbeast.servers.discovery import Asking

PROGRAM = "status"
_UNIX = "unix:"
_OF_HOSTS = ("host", "streams", "envs", "for")
_COLUMNS = ("server", "environment", "envs", "streams", "env steps/s", "env steps", "since")
_INTERVAL_S = 1.0  # in which it counts steps

_Answer = dict[str, Any] | RunError


@dataclass(frozen=True, kw_only=True)
class StatusFlags(Settings):
    """Shows the environments of environment servers, and their load."""

    servers: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[HOST:PORT ...]")
    ] = ()
    """HOST:PORT of the first server of each machine, as for --env_servers of polybeast_learner, or
    unix:BASENAME. Default: the servers of this user on this machine."""
    learner: str | None = None
    """HOST:PORT of a learner started with polybeast_learner --listen: show the hosts that have
    dialled in to it."""
    timeout: float = setting(5.0, bounds=(above, 0))
    """Seconds to wait for each server."""
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.protection  # checked
        require(
            self.learner is None or not self.servers,
            "--learner asks a learner for its hosts, and HOST:PORT names servers: use one of them",
        )

    @property
    def is_here(self) -> bool:
        """Whether the servers are reached by sockets on this machine."""
        return self.learner is None and all(named.startswith(_UNIX) for named in self.servers)

    @property
    def protection(self) -> SecurityConfig | None:
        """Protection of connections to other machines; None: there are no such connections."""
        if self.is_here:
            self.security.check_unused("HOST:PORT")
            return None
        if self.learner is None:
            return self.security.connecting("HOST:PORT", "the servers'")
        return self.security.connecting("--learner", "the learner's")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if all servers answer, 1 if not, 2 for wrong usage."""
    return command_line.main(StatusFlags, PROGRAM, argv, run)


def run(flags: StatusFlags) -> int:
    """Queries the servers, or the learner about its hosts, and prints a line for each."""
    silence_grpc()
    from torchbeast.servers.discovery import Asking

    asking = Asking(flags.timeout, flags.protection)
    if flags.learner is not None:
        return _show_hosts(flags.learner, asking)
    addresses = [a for name in _hosts(flags) for a in _addresses(name, asking)]
    before = {address: _answer(address, asking) for address in addresses}
    time.sleep(_INTERVAL_S)
    answers = [(address, _answer(address, asking)) for address in addresses]
    rows = [_row(a, before[a], said) for a, said in answers if not isinstance(said, RunError)]
    errors = [str(said) for _, said in answers if isinstance(said, RunError)]
    print("\n".join([*([_lines([_COLUMNS, *rows])] if rows else []), *errors]))
    return EXIT_FAILURE if errors else EXIT_DONE


def _hosts(flags: StatusFlags) -> list[str]:
    if flags.is_here:
        return list(flags.servers) or [user_basename()]
    return [address for named in flags.servers for address in hosts(named)]


def _addresses(host: str, asking: Asking) -> list[str]:
    """Returns the addresses of a host's servers, whose number the first one reports."""
    [first] = server_addresses(host, 1)
    try:
        return server_addresses(host, max(1, asking.ask(first)["num_servers"]))
    except RunError:
        return [first]


def _answer(address: str, asking: Asking) -> _Answer:
    """Returns what a server serves and how busy it is, or the error if it does not answer."""
    try:
        return asking.ask(address) | asking.status(address)
    except RunError as error:
        return error


def _row(address: str, before: _Answer, after: dict[str, Any]) -> tuple[str, ...]:
    if isinstance(before, RunError):
        before = after
    seconds = max(after["uptime_s"] - before["uptime_s"], 1e-3)
    since = datetime.datetime.now() - datetime.timedelta(seconds=after["uptime_s"])
    return (
        address,
        after["env_id"],
        f"{after['num_envs'] * after['num_streams']:,}",
        f"{after['open_streams']} of {after['num_streams']}",
        f"{max(0, after['steps'] - before['steps']) / seconds:,.0f}",
        f"{after['steps']:,}",
        since.isoformat(" ", "seconds"),
    )


def _show_hosts(learner: str, asking: Asking) -> int:
    rows = [
        (name, f"{streams:,}", f"{envs:,}", str(datetime.timedelta(seconds=int(seconds))))
        for name, streams, envs, seconds in asking.status(learner)["hosts"]
    ]
    print(_lines([_OF_HOSTS, *rows]) if rows else "no host has joined")
    return EXIT_DONE


def _lines(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
