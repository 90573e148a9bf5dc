# SPDX-License-Identifier: Apache-2.0
"""Messages between agents and the process of a shared replay, over a Unix socket.

    b"TBR1"                                                     4 bytes
    size of the header, size of the payload, little-endian      4 + 8 bytes
    header: a JSON object                                       at most 1 MiB
    payload: final observations, one leaf after the other       as the receiver expects

An agent sends a request and waits for its answer; there is never more than one on its way.

    request                                     answer
    {"do": "join", ...}  as Joining.as_json     {"agent": 0, ...}   after a byte with a descriptor
    {"do": "insert", "finals": K} + payload     {...}
    {"do": "fill", "first_walk": 0 or null}     {"begins": [...], "finals": K, ...} + payload
                                                {"begins": null, ...}   no episode can be sampled
    anything                                    {"refused": sentence}   and nothing was done
    anything                                    {"ended": sentence}     and the connection ends

The three dots of an answer are the replay's Figures.

The descriptor is that of the agent's *region*: memory that it shares with the service, with a batch
to insert and one that is filled. The columns never pass through the socket.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from torchbeast.core.checks import require
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.storages.chunk_ring import row_bytes

_MAGIC = b"TBR1"
_PREFIX = struct.Struct("<4sIQ")
_LARGEST_HEADER = 2**20  # bytes
_AT_ONCE = 2**20  # bytes, of one system call: so that one agent does not hold up the others


class Message(NamedTuple):
    """A header and its payload."""

    header: dict[str, Any]
    payload: bytearray


class Receiver:
    """Receives one message after the other, in as many pieces as they come."""

    def __init__(self, expected: Callable[[Mapping[str, Any]], int]) -> None:
        """Prepares to receive.

        expected: returns the size of the payload that belongs to a header, or raises ValueError.
        """
        self._expected = expected
        self._begin()

    def receive(self, connection: socket.socket) -> Message | None:
        """Takes what has come, at most one piece; returns the message when it is whole.

        Waits only if the socket does. Raises ConnectionError at the end of the connection, and
        ValueError, before it makes memory, for what is no message.
        """
        left = memoryview(self._piece)[self._filled :]
        if len(left):
            count = connection.recv_into(left[:_AT_ONCE])
            if count == 0:
                raise ConnectionError("the connection ended")
            self._filled += count
        while self._filled == len(self._piece):
            if (message := self._next_piece()) is not None:
                self._begin()
                return message
        return None

    def _begin(self) -> None:
        self._header: dict[str, Any] | None = None
        self._sizes: tuple[int, int] | None = None
        self._await(_PREFIX.size)

    def _await(self, size: int) -> None:
        self._piece, self._filled = bytearray(size), 0

    def _next_piece(self) -> Message | None:
        """Goes on after a piece that is whole; returns the message if it was the last."""
        if self._sizes is None:
            magic, header, payload = _PREFIX.unpack(self._piece)
            require(magic == _MAGIC, "this is no message of a shared replay")
            require(header <= _LARGEST_HEADER, f"a header of {header} bytes is too large")
            self._sizes = header, payload
            self._await(header)
            return None
        if self._header is None:
            self._header = _parsed(self._piece)
            size, expected = self._sizes[1], self._expected(self._header)
            require(size == expected, f"a payload of {size} bytes is not one of {expected}")
            self._await(size)
            return None
        return Message(self._header, self._piece)


def packed(header: Mapping[str, Any], payload: Sequence[np.ndarray] = ()) -> list[memoryview]:
    """Returns the pieces of a message, in order. payload: contiguous arrays."""
    text = json.dumps(header).encode()
    pieces = [array.reshape(-1).view(np.uint8).data for array in payload]
    prefix = _PREFIX.pack(_MAGIC, len(text), sum(map(len, pieces)))
    return [memoryview(prefix + text), *(piece for piece in pieces if len(piece))]


def arrays_of(payload: bytearray, specs: Sequence[ArraySpec]) -> list[np.ndarray]:
    """Returns the arrays of a payload, as views."""
    arrays, offset = [], 0
    for spec in specs:
        count = math.prod(spec.shape)
        flat = np.frombuffer(payload, spec.dtype, count, offset) if count else np.empty(0)
        arrays.append(flat.astype(spec.dtype, copy=False).reshape(spec.shape))
        offset += row_bytes([spec])
    return arrays


def number(header: Mapping[str, Any], name: str, most: int) -> int:
    """Returns an integer of a header; ValueError unless it is one, from 0 to `most`."""
    value = header.get(name)
    is_valid = type(value) is int and 0 <= value <= most
    require(is_valid, f"{name} must be a number from 0 to {most}, got {value!r}")
    return int(value)  # type: ignore[arg-type]


def _parsed(text: bytearray) -> dict[str, Any]:
    try:
        header = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a header is no JSON: {error}") from None
    require(isinstance(header, dict), "a header is a JSON object")
    return dict(header)
