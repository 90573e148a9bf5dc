# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that tests start, which use them a second or two after they are chosen."""

from __future__ import annotations

import contextlib
import random
import socket

# Meanwhile neither the workers of a Ray nor the connections of clients, which Linux gives the ports
# from 32,768 on, take one of these; chance keeps several processes of pytest apart.
_FIRST, _LAST = 20_000, 32_000
_chance = random.Random()  # not the one that tests seed


def free_port() -> int:
    """Returns a port that nobody uses."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """Returns the first of several consecutive ports that nobody uses."""
    while True:
        first = _chance.randrange(_FIRST, _LAST - count)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for port in range(first, first + count):
                probes.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
