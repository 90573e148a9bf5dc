# SPDX-License-Identifier: Apache-2.0
"""Hosts of environment servers on other machines, as --env_servers names them.

A host's address is that of its first server; its other servers are at the ports that follow.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchbeast.errors import RunError, UsageError, expanded
from torchbeast.sources.servers.addresses import host_and_port

_DNS = "dns:///"
_PAUSE_S = 0.5  # between two questions to a name server


class NoAddressError(RunError):
    """A name has no address, maybe for now: that of a container which is not up has none."""


def hosts(named: str) -> list[str]:
    """Returns the address of the first server of each host.

    named: HOST:PORT or dns:///NAME:PORT, separated by commas, or the name of a file with one of
    them on a line, where # begins a comment. dns:///NAME:PORT stands for all addresses that the
    name has now, of IPv4 or of IPv6; the certificates there must be for the name.

    Raises UsageError for a file that cannot be read, an invalid address and a host that is named
    twice, NoAddressError for a dns:/// name that has no address.
    """
    is_list = ":" in named
    found = _named_here(named) if is_list else _listed_in(Path(named))
    if not found:
        raise UsageError(f"{named} names no host: give one HOST:PORT on a line")
    for address, times in Counter(found).items():
        if times > 1:
            raise UsageError(
                f"{address} is {_where(named)} twice: name each host once, by its first port"
            )
    return found


def awaited_hosts(named: str, timeout: float, stopped: Callable[[], bool]) -> list[str]:
    """Returns the hosts, as `hosts`, once every dns:/// name has an address: a service of a
    scheduler has none before its first server is ready.

    timeout: seconds to wait. stopped: returns true once the run ends, which gives up waiting.

    Raises RunError after the timeout; UsageError as `hosts`.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return hosts(named)
        except NoAddressError as error:
            if stopped() or time.monotonic() >= deadline:
                raise RunError(f"{error} (waited {timeout:g} s)") from None
        time.sleep(min(_PAUSE_S, max(0.0, deadline - time.monotonic())))


def _where(named: str) -> str:
    """Says where the hosts are named: in a file, or in the command itself."""
    return "named" if ":" in named else f"in {named}"


def _named_here(named: str) -> list[str]:
    return [found for entry in named.split(",") for found in _addresses(entry.strip())]


def _listed_in(path: Path) -> list[str]:
    """Returns the hosts in a file; an error about one of them names its line."""
    found: list[str] = []
    for number, line in enumerate(_text(path).splitlines(), 1):
        entry = line.partition("#")[0].strip()
        try:
            found += _addresses(entry) if entry else []
        except (NoAddressError, UsageError) as error:
            raise type(error)(f"{path}, line {number}: {error}") from None
    return found


def _text(path: Path) -> str:
    try:
        return expanded(path).read_text()
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"{path} cannot be read as a list of hosts ({reason(error)}): give --env_servers "
            "HOST:PORT, or a file with one HOST:PORT on a line"
        ) from None


def _addresses(entry: str) -> list[str]:
    if not entry.startswith(_DNS):
        host, port = host_and_port(entry)
        return [f"{host}:{port}"]
    name, port = host_and_port(entry.removeprefix(_DNS))
    found: dict[int, list[str]] = {}
    for family, *_, (address, *_) in resolved(name, port):
        host = f"[{address}]" if ":" in str(address) else address
        found.setdefault(family, []).append(f"{name}@{host}:{port}")
    return list(dict.fromkeys(_of_one_kind(list(found.values()))))


def _of_one_kind(kinds: list[list[str]]) -> list[str]:
    """Returns the IPv4 or the IPv6 addresses: a machine may have one of each.

    Those that are more, else those that the system would try first.
    """
    return max(kinds, key=len)


def resolved(host: str, port: int) -> list[tuple[Any, ...]]:
    """Returns what getaddrinfo says of a host; raises NoAddressError for a name without one."""
    try:
        return list(socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError) as error:
        raise NoAddressError(
            f"the host {host} is unknown on this machine ({reason(error)}): correct the name, or "
            "give an address in numbers"
        ) from None


def reason(error: Exception) -> str:
    """Returns what the system says of an error."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
