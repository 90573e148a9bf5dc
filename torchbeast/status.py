# SPDX-License-Identifier: Apache-2.0
"""Shows what environment servers serve, and how busy they are.

python -m torchbeast.status                                        those of this user here
python -m torchbeast.status HOST:PORT --tls_ca FILE --token_file FILE      on other machines
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import tyro

from torchbeast.cli.command_line import parse
from torchbeast.core.checks import above
from torchbeast.errors import EXIT_DONE, EXIT_FAILURE, exit_code_of
from torchbeast.sources.servers.addresses import user_basename
from torchbeast.sources.servers.config import SecurityConfig
from torchbeast.sources.servers.hosts import hosts

if TYPE_CHECKING:  # compiled; `main` reports its absence
    from torchbeast.sources.servers.status import Status

PROGRAM = "status"
_UNIX = "unix:"
_COLUMNS = ("server", "serves", "envs", "streams", "env steps/s", "env steps", "since")


@dataclass(frozen=True, kw_only=True)
class StatusConfig:
    """The servers to ask."""

    servers: Annotated[str, tyro.conf.Positional] = ""
    """HOST:PORT of the first server of a machine, several as in --env_servers of
    polybeast_learner, or unix:BASENAME. Default: the servers of this user on this machine."""
    timeout: float = 5.0
    """Seconds to wait for each server."""

    def __post_init__(self) -> None:
        above(0, timeout=self.timeout)

    @property
    def is_here(self) -> bool:
        """Whether the servers are reached by sockets on this machine."""
        return not self.servers or self.servers.startswith(_UNIX)


@dataclass(frozen=True, kw_only=True)
class StatusFlags:
    """Shows what environment servers serve, and how busy they are."""

    asked: StatusConfig = field(default_factory=StatusConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    def __post_init__(self) -> None:
        if self.asked.is_here:
            self.security.check_unused("HOST:PORT")
        else:
            self.security.connecting("HOST:PORT", "the servers'")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program; returns 0 if all servers answer, 1 if not, 2 for wrong usage."""
    return exit_code_of(PROGRAM, lambda: run(parse(StatusFlags, PROGRAM, argv)))


def run(flags: StatusFlags) -> int:
    """Asks the servers and prints a line for each."""
    from torchbeast.sources.servers.discovery import Asking
    from torchbeast.sources.servers.status import ask

    asked = flags.asked
    basenames = [asked.servers or user_basename()] if asked.is_here else hosts(asked.servers)
    is_here = asked.is_here
    security = None if is_here else flags.security.connecting("HOST:PORT", "the servers'")
    found = ask(basenames, Asking(asked.timeout, security=security))
    print(table(found))
    return EXIT_FAILURE if any(server.error for server in found) else EXIT_DONE


def table(servers: Sequence[Status]) -> str:
    """Returns one line for each server, below a heading."""
    rows = [_COLUMNS, *(_row(server) for server in servers if not server.error)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows if len(rows) > 1]
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


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


if __name__ == "__main__":
    sys.exit(main())
