# SPDX-License-Identifier: Apache-2.0
"""Shows what environment servers serve, and how busy they are.

python -m torchbeast.status                                        those of this user here
python -m torchbeast.status HOST:PORT ... --tls_ca FILE --token_file FILE  on other machines
python -m torchbeast.status --learner HOST:PORT --tls_ca FILE --token_file FILE
                                                                   hosts that dial in to a learner
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from torchbeast.cli.command_line import parse
from torchbeast.core.checks import above, require
from torchbeast.errors import EXIT_DONE, EXIT_FAILURE, exit_code_of
from torchbeast.sources.servers.addresses import user_basename
from torchbeast.sources.servers.config import LearnerSecurityConfig, SecurityConfig
from torchbeast.sources.servers.handshake import silence_grpc
from torchbeast.sources.servers.hosts import hosts
from torchbeast.sources.servers.own_certificate import check_times

if TYPE_CHECKING:  # compiled; `main` reports its absence
    from torchbeast.sources.servers.status import Status

PROGRAM = "status"
_UNIX = "unix:"
_OF_HOSTS = ("host", "streams", "envs", "for")
_COLUMNS = ("server", "serves", "envs", "streams", "env steps/s", "env steps", "since")


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """The servers to ask."""

    servers: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """HOST:PORT of the first server of each machine, what --env_servers of polybeast_learner takes,
    or unix:BASENAME. Default: the servers of this user on this machine."""
    learner: str | None = None
    """HOST:PORT of a learner to which hosts dial in (polybeast_learner --listen): show the hosts
    that have joined it."""
    timeout: float = 5.0
    """Seconds to wait for each server."""

    def __post_init__(self) -> None:
        above(0, timeout=self.timeout)
        require(
            self.learner is None or not self.servers,
            f"learner shows the hosts of a learner, {' '.join(self.servers)} are servers: give "
            "either",
        )

    @property
    def is_here(self) -> bool:
        """Whether the servers are reached by sockets on this machine."""
        return self.learner is None and all(named.startswith(_UNIX) for named in self.servers)


@dataclass(frozen=True, kw_only=True)
class StatusFlags:
    """Shows what environment servers serve, and how busy they are."""

    asked: StatusConfig = field(default_factory=StatusConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        if self.asked.is_here:
            self.security.check_unused("HOST:PORT")
        else:
            self.security_of_others()

    def security_of_others(self) -> LearnerSecurityConfig:
        """Returns the protection of connections to other machines."""
        flag = "HOST:PORT" if self.asked.learner is None else "--learner"
        return self.security.connecting(flag, "the servers'")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if all servers answer, 1 if not, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(StatusFlags, PROGRAM, argv)))


def run(flags: StatusFlags) -> int:
    """Asks the servers, or the learner for its hosts, and prints a line for each."""
    if flags.asked.learner is not None:
        return _show_hosts(flags.asked.learner, flags.security_of_others(), flags.asked.timeout)
    from torchbeast.sources.servers.discovery import Asking
    from torchbeast.sources.servers.status import ask

    silence_grpc()
    asked = flags.asked
    security = None if asked.is_here else flags.security_of_others()
    if security is not None:
        check_times(security)
    found = ask(_basenames(asked), Asking(asked.timeout, security=security))
    print(table(found))
    return EXIT_FAILURE if any(server.error for server in found) else EXIT_DONE


def _basenames(asked: StatusConfig) -> list[str]:
    if asked.is_here:
        return list(asked.servers) or [user_basename()]
    return [address for named in asked.servers for address in hosts(named)]


def _show_hosts(learner: str, security: LearnerSecurityConfig, timeout: float) -> int:
    from torchbeast.sources.servers.status import ask_learner

    silence_grpc()
    check_times(security)
    rows = [_row_of_host(*host) for host in ask_learner(learner, security, timeout)]
    print(_lines([_OF_HOSTS, *rows]) if rows else "no host has joined")
    return EXIT_DONE


def _row_of_host(name: str, streams: int, envs: int, seconds: float) -> tuple[str, ...]:
    return name, f"{streams:,}", f"{envs:,}", str(datetime.timedelta(seconds=int(seconds)))


def table(servers: Sequence[Status]) -> str:
    """Returns one line for each server, below a heading."""
    rows = [_COLUMNS, *(_row(server) for server in servers if not server.error)]
    lines = [_lines(rows)] if len(rows) > 1 else []
    lines += [server.error for server in servers if server.error]
    return "\n".join(lines)


def _row(server: Status) -> tuple[str, ...]:
    return (
        server.address,
        server.serves,
        f"{server.envs:,}",
        f"{server.open_streams} of {server.streams}",
        f"{server.steps_per_s:,.0f}",
        f"{server.steps:,}",
        "" if server.since is None else server.since.isoformat(" ", "seconds"),
    )


def _lines(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
