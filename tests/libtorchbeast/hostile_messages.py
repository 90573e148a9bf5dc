# SPDX-License-Identifier: Apache-2.0
"""Random messages of rpcenv.proto: nearly sound, malformed, hostile sizes, or plain noise.

Written by hand with `wire.py`, so that a message may break every rule of the format.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable

import wire
from wire import BOOL, FLOAT32, INT32, INT64, UINT8

ITEM_SIZE = {UINT8: 1, INT32: 4, INT64: 8, FLOAT32: 4, BOOL: 1}
SIZES = [0, 1, 2, 3, 7, 255, 65_536, -1, 1 << 31, 1 << 32, 1 << 62, (1 << 64) - 1]
COUNTS = [0, 1, 2, 3, 17, 256, 257, 65_536, 1 << 31, -1]
KEYS = [b"", b"a", b"frame", "\u00e9".encode(), b"\xff\xfe", b"\x00", b"k" * 5_000]


class Calm(random.Random):
    """Always takes the likely way, which leads to sound messages."""

    def random(self) -> float:
        return 0.5


def array(rng: random.Random, dtype: int = UINT8, shape: tuple[int, ...] = (2,)) -> bytes:
    """An NDArray that is meant to have this dtype and shape, and mostly has."""
    sizes = list(shape)
    given = rng.choice(list(ITEM_SIZE)) if rng.random() < 0.05 else dtype
    if rng.random() < 0.1 and sizes:
        sizes[rng.randrange(len(sizes))] = rng.choice(SIZES)
    if rng.random() < 0.05:
        sizes += [1] * rng.choice([1, 31, 40, 1_000])
    if rng.random() < 0.03:
        given = rng.choice([-1, 9, 10, 13, 17, 19, 99, 1 << 31])
    length = ITEM_SIZE.get(given, 1)
    for size in sizes:
        length = min(length * max(size, 0), 1 << 16)
    if rng.random() < 0.05:
        length = max(0, length + rng.choice([-1, 1, 4, 1_000]))
    data = rng.randbytes(length) if rng.random() < 0.3 else bytes(length)
    return wire.array(given, sizes, data)


def nest(rng: random.Random, dtype: int = UINT8, shape: tuple[int, ...] = (2,)) -> bytes:
    """An ArrayNest that is mostly a single array."""
    leaf = wire.chunk(1, array(rng, dtype, shape))
    chance = rng.random()
    if chance < 0.85:
        return leaf
    if chance < 0.88:
        for _ in range(rng.choice([1, 31, 33, 99, 101, 5_000])):
            leaf = wire.chunk(2, leaf)
        return leaf
    if chance < 0.92:
        return wire.vector(*[leaf] * rng.choice([0, 2, 1_000]))
    if chance < 0.96:
        entry = wire.chunk(1, rng.choice(KEYS)) + wire.chunk(2, leaf)
        return wire.chunk(3, entry) * rng.choice([1, 2])
    return leaf + wire.vector(leaf) if chance < 0.98 else b""


def spoilt(rng: random.Random, message: bytes) -> bytes:
    """The message, or now and then one whose bytes are cut, changed, doubled or noise."""
    if rng.random() < 0.85:
        return message
    changes: list[Callable[[], bytes]] = [
        lambda: message[: rng.randrange(len(message) + 1)],
        lambda: message + message,
        lambda: message + wire.chunk(rng.randrange(1, 30), rng.randbytes(rng.randrange(20))),
        lambda: message + b"\xff" * rng.randrange(1, 12),  # a varint without an end
        lambda: rng.randbytes(rng.randrange(200)),
        lambda: b"",
        lambda: _with_changed_bytes(rng, message),
    ]
    return rng.choice(changes)()


def _with_changed_bytes(rng: random.Random, message: bytes) -> bytes:
    changed = bytearray(message)
    for _ in range(rng.randint(1, 4) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def action(rng: random.Random) -> bytes:
    """An Action of one environment with a discrete action space."""
    return spoilt(rng, wire.action(nest(rng, INT64, rng.choice([(), (1, 1)]))))


def seed(rng: random.Random) -> bytes:
    """A VectorAction that opens a stream."""
    return spoilt(rng, wire.vector_action(seed=rng.choice([0, 1, (1 << 64) - 1])))


def vector_action(rng: random.Random, num_envs: int) -> bytes:
    """A later VectorAction."""
    return spoilt(rng, wire.vector_action(nest(rng, INT64, (num_envs,))))


def description(rng: random.Random, num_envs: int) -> bytes:
    """A Description, mostly of so many environments in one stream of uint8 [3, 2] frames."""
    count = num_envs if rng.random() < 0.9 else rng.choice(COUNTS)
    stack = rng.choice([1, 4]) if rng.random() < 0.9 else rng.choice(COUNTS)
    streams = 1 if rng.random() < 0.9 else rng.choice(COUNTS)
    sound = wire.description(
        nest(rng, UINT8, (3, 2)), num_envs=count, num_streams=streams, stack=stack
    )
    texts = [b"", b'{"type": "Discrete", "n": 3}', b"{", b"\xff", b"[" * 100_000]
    texts_of_spaces = wire.chunk(7, rng.choice(texts)) + wire.chunk(8, rng.choice(texts))
    more = texts_of_spaces if rng.random() < 0.2 else b""
    return spoilt(rng, sound + more + (info_keywords(rng) if rng.random() < 0.2 else b""))


def info_keywords(rng: random.Random) -> bytes:
    """The keywords of a Description's info: sound ones, empty, long, equal or too many."""
    return b"".join(
        wire.chunk(12, rng.choice(KEYS)) * rng.choice([1, 1, 2, 300])
        for _ in range(rng.randint(1, 3))
    )


def vector_step(rng: random.Random, num_envs: int) -> bytes:
    """A VectorStep, mostly of so many environments with uint8 [3, 2] frames."""
    truncated = rng.random() < 0.2
    frames = nest(rng, UINT8, (num_envs, 3, 2))
    fields = {"observation": frames}
    if truncated:
        fields["truncated"] = wire.array(BOOL, (num_envs,), b"\1" * num_envs)
        fields["final_observation"] = nest(rng, UINT8, (num_envs, 3, 2))
    if rng.random() < 0.2:
        name = rng.choice(["reward", "terminated", "truncated", "episode_end", "episode_step"])
        fields[name] = array(rng, rng.choice([FLOAT32, BOOL, INT32]), (num_envs,))
    if rng.random() < 0.05:
        numbers = struct.pack(f"<{num_envs}f", *[float("nan")] * num_envs)
        fields["reward"] = wire.array(FLOAT32, (num_envs,), numbers)
    if rng.random() < 0.1:
        fields["episode_end"] = wire.array(BOOL, (num_envs,), b"\1" * num_envs)
        fields["info"] = array(rng, FLOAT32, (num_envs, rng.choice([0, 1, 2])))
    return spoilt(rng, wire.vector_step(num_envs, **fields))


def step(rng: random.Random) -> bytes:
    """A Step of the original protocol."""
    reward = rng.choice([0.0, 1.0, float("nan"), 3e38])
    return spoilt(rng, wire.step(nest(rng, UINT8, (3, 2)), reward, rng.random() < 0.3))
