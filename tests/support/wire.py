# SPDX-License-Identifier: Apache-2.0
"""Encodes messages of rpcenv.proto by hand, valid and invalid ones.

A message is a sequence of fields. A field is a tag (number << 3 | wire type) and a value: a varint
(wire type 0), eight bytes (1), a length and that many bytes (2), or four bytes (5). A varint holds
seven bits a byte, lowest first; the high bit says that more follow. Zeros are not sent.
tests/golden/test_wire_bytes.py holds this module against messages written out byte by byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

UINT8, INT32, INT64, FLOAT32, BOOL = 2, 5, 7, 11, 0  # numpy's type numbers


def varint(value: int) -> bytes:
    """Encodes an integer; negative ones take ten bytes, because they are sent as 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value) if value else b""


def chunk(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def float32(field: int, value: float) -> bytes:
    return varint(field << 3 | 5) + struct.pack("<f", value) if value else b""


def array(dtype: int, shape: Iterable[int], data: bytes = b"") -> bytes:
    """Encodes an NDArray."""
    dims = b"".join(varint(size) for size in shape)
    packed = chunk(2, dims) if dims else b""
    return number(1, dtype) + packed + (chunk(3, data) if data else b"")


def leaf(dtype: int, shape: Iterable[int], data: bytes = b"") -> bytes:
    """Encodes an ArrayNest that is an array."""
    return chunk(1, array(dtype, shape, data))


def vector(*nests: bytes) -> bytes:
    """Encodes an ArrayNest that is a vector."""
    return b"".join(chunk(2, nest) for nest in nests)


def mapping(**nests: bytes) -> bytes:
    """Encodes an ArrayNest that is a map: each entry is a message of key = 1 and value = 2."""
    return b"".join(
        chunk(3, chunk(1, key.encode()) + chunk(2, nest)) for key, nest in nests.items()
    )


def step(
    observation: bytes,
    reward: float = 0.0,
    done: bool = False,
    episode_step: int = 0,
    episode_return: float = 0.0,
) -> bytes:
    return (
        chunk(1, observation)
        + float32(2, reward)
        + number(3, done)
        + number(4, episode_step)
        + float32(5, episode_return)
    )


def action(nest: bytes) -> bytes:
    """Encodes an Action."""
    return chunk(2, nest)


def discrete_action(value: int = 0) -> bytes:
    """Encodes an Action of one environment with a discrete action space."""
    return action(leaf(INT64, (), struct.pack("<q", value)))


def description(
    observation: bytes,
    *,
    version: int = 1,
    num_envs: int = 1,
    num_streams: int = 1,
    stack: int = 1,
    action_space: bytes = b"",
    observation_space: bytes = b"",
    options: bytes = b"",
    info_keywords: Iterable[bytes] = (),
) -> bytes:
    """Encodes a Description."""
    return (
        number(1, version)
        + chunk(2, b"Fake")
        + number(3, num_envs)
        + number(4, num_streams)
        + number(5, stack)
        + chunk(6, observation)
        + chunk(7, action_space)
        + chunk(8, observation_space)
        + chunk(10, options)
        + b"".join(chunk(12, keyword) for keyword in info_keywords)
    )


def vector_step(num_envs: int, **given: bytes) -> bytes:
    """Encodes a VectorStep of zeros, except for the fields that are given."""
    shape = (num_envs,)
    fields = {
        "observation": b"",
        "reward": array(FLOAT32, shape, bytes(4 * num_envs)),
        "terminated": array(BOOL, shape, bytes(num_envs)),
        "truncated": array(BOOL, shape, bytes(num_envs)),
        "episode_end": array(BOOL, shape, bytes(num_envs)),
        "episode_step": array(INT32, shape, bytes(4 * num_envs)),
        "episode_return": array(FLOAT32, shape, bytes(4 * num_envs)),
        "final_observation": b"",
        "info": b"",
    } | given
    return b"".join(
        chunk(place, content) for place, content in enumerate(fields.values(), 1) if content
    )


def vector_action(nest: bytes = b"", seed: int = 0) -> bytes:
    """Encodes a VectorAction."""
    return number(1, seed) + (chunk(2, nest) if nest else b"")
