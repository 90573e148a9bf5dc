# SPDX-License-Identifier: Apache-2.0
"""Asks a door which hosts it knows."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from torchbeast.errors import RunError
from torchbeast.sources.tunnel.connection import Connection
from torchbeast.sources.tunnel.messages import END, RefusedError, raise_if_refused
from torchbeast.sources.tunnel.time_limit import within
from torchbeast.sources.tunnel.way import Way, reason

_HOST = re.compile(rb"([A-Za-z0-9._-]{1,60}) (here|away) ([0-9]{1,9}) ([0-9]{1,9}) ([0-9]{1,9})")


@dataclass(frozen=True)
class KnownHost:
    """A host that is there, or was."""

    label: str
    is_here: bool
    servers: int
    connections: int  # of the learner to its servers
    seconds: int  # since it came or went


def ask(way: Way, timeout: float) -> list[KnownHost]:
    """Returns the hosts that the door knows; raises RunError if it does not answer."""
    try:
        return asyncio.run(_ask(way, timeout))
    except RefusedError as error:
        raise RunError(f"{way.door}: {error}") from None
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        way.explain()
        why = reason(error, timeout)
        raise RunError(f"no learner answers at {way.door} ({why})") from None


async def _ask(way: Way, timeout: float) -> list[KnownHost]:
    connection = Connection()
    try:
        return await within(timeout, _conversation(way, connection))
    finally:
        connection.abort()


async def _conversation(way: Way, connection: Connection) -> list[KnownHost]:
    await way.greet(connection)
    connection.send(b"status")
    known = []
    while (line := await connection.line()) != END:
        known.append(_parse(line))
    return known


def _parse(line: bytes) -> KnownHost:
    """Parses what the door says of a host; raises RefusedError, or ValueError for other lines."""
    raise_if_refused(line)
    found = _HOST.fullmatch(line)
    if found is None:
        raise ValueError("it said something that this version does not understand")
    label, state, *numbers = (word.decode() for word in found.groups())
    return KnownHost(label, state == "here", *map(int, numbers))
