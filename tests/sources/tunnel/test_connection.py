# SPDX-License-Identifier: Apache-2.0
"""A connection's lines, and who stops whose reading when two are joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from torchbeast.sources.tunnel.connection import Connection
from torchbeast.sources.tunnel.messages import MAX_LINE


class Transport(asyncio.Transport):
    """A transport that keeps what is written, and is full from `limit` bytes on."""

    def __init__(self, connection: Connection, limit: int = 10) -> None:
        super().__init__()
        self.connection, self.limit = connection, limit
        self.written = b""
        self.reads, self.is_full, self.closed = True, False, False
        connection.connection_made(self)

    def write(self, data: Any) -> None:
        self.written += data
        if len(self.written) >= self.limit and not self.is_full:
            self.is_full = True
            self.connection.pause_writing()

    def drain(self) -> None:
        self.written, self.is_full = b"", False
        self.connection.resume_writing()

    def get_write_buffer_size(self) -> int:
        return len(self.written)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def in_loop(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(body())


def pair() -> tuple[Connection, Connection, Transport, Transport]:
    one, two = Connection(), Connection()
    return one, two, Transport(one), Transport(two)


def test_lines_come_one_by_one_however_they_were_cut() -> None:
    async def body() -> None:
        connection = Connection()
        Transport(connection)
        for piece in (b"fi", b"rst\nsec", b"ond\n", b"\n"):
            connection.data_received(piece)
        assert [await connection.line() for _ in range(3)] == [b"first", b"second", b""]

    in_loop(body)


@pytest.mark.parametrize(("length", "fits"), [(MAX_LINE, True), (MAX_LINE + 1, False)])
def test_a_line_has_a_bound(length: int, fits: bool) -> None:
    async def body() -> None:
        connection = Connection()
        Transport(connection)
        connection.data_received(b"x" * length + b"\n")
        if fits:
            assert len(await connection.line()) == length
        else:
            with pytest.raises(ValueError, match=f"more than {MAX_LINE} bytes"):
                await connection.line()

    in_loop(body)


def test_whoever_waits_for_a_line_hears_of_the_end() -> None:
    async def body() -> None:
        connection = Connection()
        Transport(connection)
        waiting = asyncio.ensure_future(connection.line())
        await asyncio.sleep(0)
        connection.data_received(b"half a li")
        connection.connection_lost(None)
        with pytest.raises(ConnectionError):
            await waiting

    in_loop(body)


def test_one_reads_only_while_the_other_can_send() -> None:
    async def body() -> None:
        one, two, of_one, of_two = pair()
        one.join(two)
        one.data_received(b"123456789")
        assert of_one.reads
        one.data_received(b"0")
        assert not of_one.reads and of_two.reads
        of_two.drain()
        assert of_one.reads

    in_loop(body)


def test_bytes_from_before_the_join_count_too() -> None:
    async def body() -> None:
        one, two, of_one, of_two = pair()
        one.data_received(b"0123456789ab")
        one.join(two)
        assert of_two.written == b"0123456789ab"
        assert not of_one.reads and of_two.reads
        of_two.drain()
        assert of_one.reads

    in_loop(body)


def test_unread_bytes_stop_the_reading_until_they_are_relayed() -> None:
    async def body() -> None:
        one, two, of_one, of_two = pair()
        of_two.limit = 1 << 20
        one.data_received(b"x" * (1 << 17))
        assert not of_one.reads
        one.join(two)
        assert of_one.reads and one.unread == 0

    in_loop(body)


@pytest.mark.parametrize("before", [True, False])
def test_the_end_of_one_closes_the_other_before_and_after_the_join(before: bool) -> None:
    async def body() -> None:
        one, two, _, of_two = pair()
        if before:
            one.connection_lost(None)
        one.join(two)
        if not before:
            assert not of_two.closed
            one.connection_lost(None)
        assert of_two.closed

    in_loop(body)
