# SPDX-License-Identifier: Apache-2.0
"""Whatever a peer says is either a message of the protocol or refused with ValueError."""

from __future__ import annotations

import random

import pytest

from torchbeast.sources.tunnel.messages import (
    HostHello,
    LaterError,
    RefusedError,
    SpareHello,
    StatusHello,
    admitted_as,
    as_name,
    as_told,
    check_banner,
    has_token,
    host_line,
    parse_hello,
    spare_line,
    told_line,
)

ID = "0123456789abcdef" * 2
SERVED = "00112233445566aa"
GOOD = [
    b"host a.lab %s 16 %s" % (ID.encode(), SERVED.encode()),
    b"spare %s 0" % ID.encode(),
    b"status",
]


def test_a_host_and_a_spare_connection_are_understood() -> None:
    host, spare = HostHello("a.lab", ID, 16, SERVED), SpareHello(ID, 999)
    assert parse_hello(host_line(host)) == host
    assert parse_hello(spare_line(spare)) == spare
    assert parse_hello(b"status") == StatusHello()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"host",
        b"host ../a %s 1 %s" % (ID.encode(), SERVED.encode()),
        b"host a/b %s 1 %s" % (ID.encode(), SERVED.encode()),
        b"host .a %s 1 %s" % (ID.encode(), SERVED.encode()),
        b"host %s %s 1 %s" % (b"a" * 41, ID.encode(), SERVED.encode()),
        b"host a %s 0 %s" % (ID.encode(), SERVED.encode()),
        b"host a %s 1000 %s" % (ID.encode(), SERVED.encode()),
        b"host a %s -1 %s" % (ID.encode(), SERVED.encode()),
        b"host a %s 1 %s\x00" % (ID.encode(), SERVED.encode()),
        b"host a %s 1 %s" % (ID.upper().encode(), SERVED.encode()),
        b"host a %s 1 %s" % (ID.encode(), SERVED[1:].encode()),
        b"host a %s 1" % ID.encode(),
        b"host \xc3\xa9 %s 1 %s" % (ID.encode(), SERVED.encode()),
        b"spare %s 01" % ID.encode(),
        b"spare %s" % ID.encode(),
        b"status now",
    ],
)
def test_anything_else_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="expected a host"):
        parse_hello(line)


def test_random_and_mutated_lines_never_do_more_than_raise_value_error() -> None:
    """A name that gets through has no separator of paths, and is no hidden or parent folder."""
    draw = random.Random(0)
    through = 0
    for i in range(50_000):
        line = bytearray(GOOD[i % 3] if i % 4 else draw.randbytes(draw.randrange(80)))
        for _ in range(draw.randrange(3)):
            line[draw.randrange(len(line) or 1) :][:1] = draw.randbytes(1)
            at = draw.randrange(len(line) + 1)
            line[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
        try:
            hello = parse_hello(bytes(line))
        except ValueError:
            continue
        through += 1
        if isinstance(hello, HostHello):
            assert 0 < len(hello.name) <= 40 and not set("/\0\n ") & set(hello.name)
            assert hello.name[0] != "." and 0 < hello.servers < 1000
    assert 10_000 < through < 40_000


@pytest.mark.parametrize(
    ("said", "expected"),
    [(b"token right", True), (b"token wrong", False), (b"token ", False), (b"token righ", False)],
)
def test_only_the_right_token_is_one(said: bytes, expected: bool) -> None:
    assert has_token(said, "right") == expected


@pytest.mark.parametrize("said", [b"", b"token", b"Token a", b"token a b", b"token \xff", b"GET /"])
def test_a_line_without_a_token_is_refused(said: bytes) -> None:
    with pytest.raises(ValueError, match="a line with a token"):
        has_token(said, "right")


def test_without_a_wanted_token_any_will_do() -> None:
    assert has_token(b"token ", "") and has_token(b"token other", "")


def test_a_refusal_is_for_good_or_for_now() -> None:
    assert admitted_as(b"admitted a.lab-2") == "a.lab-2"
    with pytest.raises(RefusedError, match="^no$"):
        admitted_as(b"refused no")
    with pytest.raises(LaterError, match="^wait$"):
        admitted_as(b"later wait")
    for line in (b"refused ", b"admitted", b"refused \x1b[2J", b"later " + b"a" * 500):
        with pytest.raises(ValueError, match="no answer that this version understands"):
            admitted_as(line)


@pytest.mark.parametrize(
    ("sentence", "heard"),
    [("no", "no"), ("k\u00e4fer\n\x1b[2J", "k fer [2J"), ("a" * 999, "a" * 400)],
)
def test_a_sentence_for_a_host_fits_into_a_line(sentence: str, heard: str) -> None:
    assert as_told(told_line(sentence)) == heard
    assert told_line(sentence).count(b"\n") == 0


def test_other_lines_tell_a_host_nothing() -> None:
    for line in (b"beat", b"ended", b"told ", b"told \x1b[2J", b"told " + b"a" * 401):
        assert as_told(line) is None


def test_the_banner_tells_another_version_from_another_program() -> None:
    check_banner(b"torchbeast door 3")
    for other in (b"torchbeast door 2", b"torchbeast door 4"):  # 2 told nothing
        with pytest.raises(RefusedError, match="another version"):
            check_banner(other)
    with pytest.raises(RefusedError, match="another program"):
        check_banner(b"SSH-2.0-OpenSSH_9.6")


@pytest.mark.parametrize(
    ("hostname", "name"),
    [("a.lab", "a.lab"), ("käfer", "k-fer"), (".x", "h.x"), ("", "h"), ("a" * 64, "a" * 40)],
)
def test_every_name_of_a_machine_becomes_one_that_the_door_takes(hostname: str, name: str) -> None:
    assert as_name(hostname) == name
    assert parse_hello(host_line(HostHello(name, ID, 1, SERVED))) == HostHello(name, ID, 1, SERVED)
