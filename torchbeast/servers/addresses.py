# SPDX-License-Identifier: Apache-2.0
"""Addresses of environment servers.

Server i listens at `<basename>.<i>`, or at the port of server 0 plus i. A host on another machine
is named by the port of its server 0.

`polybeast` uses a folder of its run, so that two runs never connect to each other. `polybeast_env`
and `polybeast_learner` use one folder per user, so that two terminals of a user find each other,
but two users do not. Both folders are private to their owner (0700).
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl
import stat
import tempfile
import time
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from torchbeast.errors import RunError, UsageError, refusing_paths

MAX_SOCKET_PATH = 107  # bytes; the limit for the path of a Unix socket on Linux
MAX_PORT = 65_535
_UNIX = "unix:"
_ELSEWHERE = "set TMPDIR to a folder that you can write to, or use pipes_basename"
_FLOOD = 1 << 16  # bytes that a server has not read yet
_HOST = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]", re.ASCII)
PROBE_EVERY_S = 2.0  # between two checks whether a server still accepts connections
_ANSWER_S = 5.0  # time limit of a check
EVERY_NETWORK = {"0.0.0.0", "::"}  # for gRPC each means IPv4 and IPv6


def server_addresses(basename: str, count: int) -> list[str]:
    """Returns the addresses of servers 0 to count - 1.

    basename: the common part of sockets, or HOST:PORT of server 0.

    Raises UsageError if a path is too long for a Unix socket, or a port is too high.
    """
    if not basename.startswith(_UNIX):
        return _tcp_addresses(basename, count)
    addresses = [f"{basename}.{i}" for i in range(count)]
    longest = socket_path(addresses[-1])
    if longest is not None and len(os.fsencode(longest)) > MAX_SOCKET_PATH:
        raise UsageError(
            f"the path of the socket {longest} has {len(os.fsencode(longest))} bytes, more than "
            f"the {MAX_SOCKET_PATH} of a Unix socket: use a shorter pipes_basename, or TMPDIR"
        )
    return addresses


def _tcp_addresses(first: str, count: int) -> list[str]:
    host, port = host_and_port(first)
    if port + count - 1 > MAX_PORT:
        raise UsageError(
            f"{count} servers need the ports {port} to {port + count - 1}, but {MAX_PORT} is the "
            f"last: use a port lower than {first}'s"
        )
    return [f"{host}:{port + i}" for i in range(count)]


def host_and_port(address: str) -> tuple[str, int]:
    """Splits HOST:PORT, or [IPv6 address]:PORT; raises UsageError for anything else."""
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and 1 <= int(port) <= MAX_PORT
    if not is_port or not _HOST.fullmatch(host):
        raise UsageError(
            f"expected HOST:PORT with a port of 1 to {MAX_PORT}, such as "
            f"10.0.0.5:50051 or [::1]:50051, got {address!r:.100}"
        )
    return host, int(port)


def socket_path(address: str) -> Path | None:
    """Returns the path in a Unix socket's address; None for another kind of address."""
    if not address.startswith(_UNIX):
        return None
    return Path(address.removeprefix(_UNIX).replace("//", "/", 1))


def hosts(named: str) -> list[str]:
    """Returns the address of the first server of each host.

    named: HOST:PORT of each, separated by commas.

    Raises UsageError for an invalid address, and if a host is named twice.
    """
    addresses = ["{}:{}".format(*host_and_port(host.strip())) for host in named.split(",")]
    for address in addresses:
        if addresses.count(address) > 1:
            raise UsageError(
                f"{named} names {address} twice: list each host once, with its first port"
            )
    return addresses


def resolved(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Returns the family and the address of each socket of a host; raises RunError if the name is
    unknown, for example because a container is not up yet.
    """
    try:
        sockets = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RunError(
            f"the host {host} is unknown on this machine ({error}): correct the name, or use a "
            "numeric address"
        ) from None
    return [(family, address) for family, *_, address in sockets]


def check_free(address: str) -> None:
    """Raises UsageError if a server cannot listen at HOST:PORT.

    If HOST means every network, both IPv4 and IPv6 must be free; gRPC itself accepts one of them.
    """
    host, port = host_and_port(address)
    both = host.strip("[]") in EVERY_NETWORK and socket.has_dualstack_ipv6()
    family, place = (socket.AF_INET6, ("::", port)) if both else resolved(host, port)[0]
    try:
        socket.create_server(place, family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise UsageError(
            f"cannot listen at {address} ({os.strerror(error.errno or 0)}): stop the program that "
            "uses the port, or use another port or address of this machine"
        ) from None


def answers(address: str, seconds: float) -> bool:
    """Returns whether this process's server at HOST:PORT still accepts connections.

    A server has `seconds` to answer the first message of a TLS client; without TLS it speaks first.
    It also returns False if this process has too many open files for another connection.
    """
    host, port = host_and_port(address)
    try:
        with socket.create_connection((host.strip("[]"), port), seconds) as probe:
            probe.sendall(_hello())
            probe.recv(1)
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in (errno.EMFILE, errno.ENFILE)
    return True


class PortCheck:
    """Notices that this process's server at HOST:PORT does not accept connections any more.

    gRPC 1.51 stops listening for good if it cannot accept a connection, without a message. A flood
    of calls also keeps it from accepting anyone, but only as long as it lasts, and open streams
    continue.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._unanswered, self._next = 0, 0.0

    def is_deaf(self) -> bool:
        """Connects, at most every two seconds; True from the second time without an answer on."""
        if self._unanswered < 2 and time.monotonic() >= self._next:
            accepts = answers(self._address, _ANSWER_S) or is_flooded(self._address)
            self._unanswered = 0 if accepts else self._unanswered + 1
            self._next = time.monotonic() + PROBE_EVERY_S
        return self._unanswered >= 2


def is_flooded(address: str) -> bool:
    """Returns whether an accepted client of the server at HOST:PORT sends faster than it reads.

    Reads the kernel's tables of connections; returns False on systems without /proc.
    """
    port = f":{host_and_port(address)[1]:04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                local, queues, inode = itemgetter(1, 4, 9)(line.split())
                has_unread = int(queues.partition(":")[2], 16) > _FLOOD
                if local.endswith(port) and has_unread and inode != "0":  # 0: not accepted
                    return True
    return False


def _hello() -> bytes:
    """Returns the first message of a TLS client. For other bytes gRPC would print an error."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    tls = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return sent.read()


def run_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a private folder (mode 0700) for the sockets of a run; a context removes it."""
    with refusing_paths(_ELSEWHERE, "the folder for sockets"):
        return tempfile.TemporaryDirectory(
            prefix="torchbeast-", dir=runtime_folder(), ignore_cleanup_errors=True
        )


def user_basename() -> str:
    """Returns the basename in the user's folder; makes the folder if necessary."""
    runtime = runtime_folder()
    name = "torchbeast" if runtime else f"torchbeast-{os.getuid()}"
    with refusing_paths(_ELSEWHERE, "the folder for sockets"):
        return folder_basename(_own_folder((runtime or Path(tempfile.gettempdir())) / name))


def folder_basename(folder: str | Path) -> str:
    """Returns the basename in the folder of a run."""
    return f"{_UNIX}{folder}/polybeast"


def runtime_folder() -> Path | None:
    """Returns $XDG_RUNTIME_DIR if it is writable, else None."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    return Path(folder) if folder and os.access(folder, os.W_OK | os.X_OK) else None


def _own_folder(folder: Path) -> Path:
    """Makes a private folder for this user.

    Raises UsageError for a folder that another user can enter or may have made.
    """
    with suppress(FileExistsError):  # perhaps by a file, or a link that leads nowhere
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
    if status.st_uid != os.getuid() or not private:
        raise UsageError(
            f"{folder} is not a private folder of this user (owner {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):04o}): remove it, or use pipes_basename"
        )
    return folder
