# SPDX-License-Identifier: Apache-2.0
"""Hosts of environment servers on other machines, as --env_servers and --listen name them.

A host's address is that of its first server; its other servers are at the ports that follow.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchbeast.errors import UsageError
from torchbeast.sources.servers.addresses import host_and_port

_DNS = "dns:///"


def hosts(named: str) -> list[str]:
    """Returns the address of the first server of each host.

    named: HOST:PORT or dns:///NAME:PORT, separated by commas, or the name of a file with one of
    them on a line, where # begins a comment. dns:///NAME:PORT stands for all addresses that the
    name has now; the certificates there must be for the name.

    Raises UsageError for a file that cannot be read, an invalid address, a name without an address
    and a host that is named twice.
    """
    found = _named_here(named) if ":" in named else _listed_in(Path(named).expanduser())
    if not found:
        raise UsageError(f"{named} names no host: give one HOST:PORT on a line")
    for address, times in Counter(found).items():
        if times > 1:
            raise UsageError(
                f"{address} is {_where(named)} twice: name each host once, by its first port"
            )
    return found


def _where(named: str) -> str:
    """Says where the hosts are named: in a file, or in the command itself."""
    return "named" if ":" in named else f"in {named}"


def _named_here(named: str) -> list[str]:
    return [address for entry in named.split(",") for address in _addresses(entry.strip())]


def _listed_in(path: Path) -> list[str]:
    """Returns the hosts in a file; an error about one of them names its line."""
    found: list[str] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        entry = line.partition("#")[0].strip()
        try:
            found += _addresses(entry) if entry else []
        except UsageError as error:
            raise UsageError(f"{path}, line {number}: {error}") from None
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"{path} cannot be read as a list of hosts ({reason(error)}): give --env_servers "
            "HOST:PORT, or a file with one HOST:PORT on a line"
        ) from None


def _addresses(entry: str) -> Iterator[str]:
    if not entry.startswith(_DNS):
        host, port = host_and_port(entry)
        yield f"{host}:{port}"
        return
    name, port = host_and_port(entry.removeprefix(_DNS))
    for address in dict.fromkeys(str(found[4][0]) for found in resolved(name, port)):
        yield f"{name}@{f'[{address}]' if ':' in address else address}:{port}"


def resolved(host: str, port: int) -> list[tuple[Any, ...]]:
    """Returns what getaddrinfo says of a host; raises UsageError for a name without an address."""
    try:
        return list(socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"the host {host} is unknown on this machine ({reason(error)}): correct the name, or "
            "give an address in numbers"
        ) from None


def reason(error: Exception) -> str:
    """Returns what the system says of an error."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
