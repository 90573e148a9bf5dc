# SPDX-License-Identifier: Apache-2.0
r"""What a host and the door say to each other: lines of words, before bytes are relayed.

    door                               host
    "torchbeast door 3"
                                       "token TOKEN"
                                       "host NAME ID SERVERS SERVED" | "spare ID SERVER" | "status"
    to a host: "admitted LABEL"
    both, again and again: "beat"
    "told SENTENCE" to a host that is not used, and why
    "ended" when the learner ends
    to a spare: "go"
    what follows belongs to the server
    who asks for the status: "LABEL here|away SERVERS CONNECTIONS SECONDS" for each host, "end"

In place of an answer "refused SENTENCE" ends a connection for good, and "later SENTENCE" for now.
Nothing that a peer says is used before a regular expression has matched all of its line.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass

from torchbeast.sources.servers.config import MAX_TOKEN

VERSION = 3
BANNER = b"torchbeast door %d" % VERSION
BEAT, ENDED, GO, END = b"beat", b"ended", b"go", b"end"
OTHER_PROGRAM = (
    "that port belongs to another program, such as polybeast_env --listen: give that of "
    "polybeast_learner --listen"
)
MAX_LINE = MAX_TOKEN + 24  # bytes
MAX_SERVERS = 999  # of one host

BEAT_S = 5.0  # from one beat of a host to the next
SILENCE_S = 20.0  # without a beat, after which the other end counts as gone
HANDSHAKE_S = 10.0  # from the first byte to the admission

_NAME = rb"[A-Za-z0-9_-][A-Za-z0-9._-]{0,39}"
_HOST = re.compile(rb"host (%s) ([0-9a-f]{32}) ([1-9][0-9]{0,2}) ([0-9a-f]{16})" % _NAME)
_SPARE = re.compile(rb"spare ([0-9a-f]{32}) (0|[1-9][0-9]{0,2})")
_TOKEN = re.compile(rb"token ([!-~]{0,%d})" % MAX_TOKEN)
_ADMITTED = re.compile(rb"admitted ([A-Za-z0-9._-]{1,60})")
_REFUSED = re.compile(rb"(refused|later) ([ -~]{1,400})")
_TOLD = re.compile(rb"told ([ -~]{1,400})")
_UNPRINTABLE = re.compile(r"[^ -~]+")
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class HostHello:
    """A host registers; `id` is new for every process that dials."""

    name: str
    id: str
    servers: int
    served: str  # a fingerprint of what its servers describe, see `fingerprint.py`


@dataclass(frozen=True)
class SpareHello:
    """A connection that will be relayed to a server of a registered host."""

    id: str
    server: int


@dataclass(frozen=True)
class StatusHello:
    """Somebody asks which hosts there are."""


Hello = HostHello | SpareHello | StatusHello


class RefusedError(Exception):
    """The other side will never admit this one; the message is its sentence."""


class LaterError(ConnectionError):
    """The other side does not admit this one now; the message is its sentence."""


def has_token(line: bytes, token: str) -> bool:
    """Returns whether a line carries the token, in a time that tells nothing of the token.

    token: "" if none is wanted.

    Raises ValueError for another kind of line.
    """
    found = _TOKEN.fullmatch(line)
    if found is None:
        raise ValueError("expected a line with a token")
    return not token or hmac.compare_digest(found[1], token.encode())


def parse_hello(line: bytes) -> Hello:
    """Parses what a connection is for; raises ValueError for anything else."""
    if found := _HOST.fullmatch(line):
        return HostHello(found[1].decode(), found[2].decode(), int(found[3]), found[4].decode())
    if found := _SPARE.fullmatch(line):
        return SpareHello(found[1].decode(), int(found[2]))
    if line == b"status":
        return StatusHello()
    raise ValueError("expected a host, a spare connection or a question for the status")


def admitted_as(line: bytes) -> str:
    """Returns the label under which the door admitted this host.

    Raises RefusedError, LaterError, or ValueError for anything else.
    """
    if found := _ADMITTED.fullmatch(line):
        return found[1].decode()
    raise_if_refused(line)
    raise ValueError("the door gave no answer that this version understands")


def raise_if_refused(line: bytes) -> None:
    """Raises RefusedError or LaterError for the lines that mean it."""
    if found := _REFUSED.fullmatch(line):
        kind = RefusedError if found[1] == b"refused" else LaterError
        raise kind(found[2].decode())


def told_line(sentence: str) -> bytes:
    """Returns the line that tells a host a sentence; what does not fit into a line is cut."""
    return b"told " + _UNPRINTABLE.sub(" ", sentence)[:400].encode()


def as_told(line: bytes) -> str | None:
    """Returns the sentence that a line tells a host; None for other lines."""
    found = _TOLD.fullmatch(line)
    return None if found is None else found[1].decode()


def check_banner(line: bytes) -> None:
    """Raises RefusedError unless a door of this version said the line."""
    if line == BANNER:
        return
    if line.startswith(b"torchbeast door "):
        raise RefusedError("the learner there has another version: install the same one on both")
    raise RefusedError(OTHER_PROGRAM)


def token_line(token: str) -> bytes:
    """Returns the line that carries a token; "": none."""
    return b"token %s" % token.encode()


def host_line(hello: HostHello) -> bytes:
    """Returns the line that registers a host."""
    return f"host {hello.name} {hello.id} {hello.servers} {hello.served}".encode()


def spare_line(hello: SpareHello) -> bytes:
    """Returns the line of a connection for a server."""
    return f"spare {hello.id} {hello.server}".encode()


def as_name(hostname: str) -> str:
    """Returns a host's name as `HostHello` takes it: other characters become `-`."""
    name = _NOT_IN_NAME.sub("-", hostname)[:40]
    return name if name and not name.startswith(".") else f"h{name[:39]}"
