# SPDX-License-Identifier: Apache-2.0
"""The door lets in whoever has the token, and nobody else; no peer is in another one's way."""

from __future__ import annotations

import contextlib
import errno
import itertools
import random
import socket
import ssl
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from background import Background, wait_for
from doors import ID, OTHER_ID, SERVED, TOKEN, OpenDoor, Peer, host, learner, opened, spare
from keys_of_tests import Keys

from torchbeast.errors import UsageError
from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.tunnel import door as door_module
from torchbeast.sources.tunnel import place as place_module
from torchbeast.sources.tunnel import tls
from torchbeast.sources.tunnel.connection import Connection

MANY = 1 << 20


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "ours")


@pytest.fixture
def door(runtime_folder: Path) -> Iterator[OpenDoor]:
    with opened(runtime_folder) as made:
        yield made


@pytest.fixture
def encrypted(runtime_folder: Path, keys: Keys) -> Iterator[OpenDoor]:
    files = ServerSecurityConfig(
        tls_cert=keys.cert, tls_key=keys.key, tls_client_ca=keys.ca, token_file=keys.token
    )
    with opened(runtime_folder, tls.of_door(files), handshake_s=0.5) as made:
        yield made


def of_client(keys: Keys, own: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=keys.ca)
    if own:
        context.load_cert_chain(keys.client_cert, keys.client_key)
    return context


def test_bytes_pass_both_ways_unchanged(door: OpenDoor) -> None:
    """More than any buffer holds, and what was said before the connections were joined."""
    data = random.Random(0).randbytes(3 * MANY)
    with host(door):
        visit = door.visit()
        assert (visit.label, visit.is_here) == ("a", True)
        with learner(visit.addresses[0]) as ours:
            ours.sendall(b"early")
            with spare(door) as theirs:
                assert theirs.line() == b"go"
                assert theirs.exactly(5) == b"early"
                sending = Background(ours.sendall, data)
                back = Background(theirs.socket.sendall, data[::-1])
                assert theirs.exactly(len(data)) == data
                received = b""
                while len(received) < len(data):
                    received += ours.recv(MANY)
                assert received == data[::-1]
                sending.result(), back.result()


@pytest.mark.parametrize("first", ["learner", "host"])
def test_the_end_of_one_side_is_the_end_of_the_other(door: OpenDoor, first: str) -> None:
    with host(door), spare(door) as theirs:
        with learner(door.visit().addresses[0]) as ours:
            assert theirs.line() == b"go"
            if first == "learner":
                ours.close()
                assert theirs.is_closed()
            else:
                theirs.socket.close()
                assert ours.recv(1) == b""


def test_each_server_has_its_own_socket(door: OpenDoor) -> None:
    with host(door, servers=2), spare(door, 1) as second, spare(door, 0) as first:
        addresses = door.visit().addresses
        assert len(set(addresses)) == 2
        with learner(addresses[1]) as ours:
            assert second.line() == b"go"
            ours.sendall(b"two")
            assert second.exactly(3) == b"two"
            with learner(addresses[0]):
                assert first.line() == b"go"


@pytest.mark.parametrize(
    "said",
    [b"token another-token-of-16", b"token ", b"token " + TOKEN[:-1], b"token " + TOKEN + b"x"],
)
def test_a_wrong_token_is_refused_with_a_sentence(door: OpenDoor, said: bytes) -> None:
    with Peer(door.port) as peer:
        peer.line()
        peer.say(said, b"host a %s 1 %s" % (ID, SERVED))
        assert peer.line().startswith(b"refused this learner admits only hosts with its token")
        assert peer.is_closed()
    assert door.visits.empty() and list(door.folder.iterdir()) == []


def test_a_token_that_arrives_byte_by_byte_is_one(door: OpenDoor) -> None:
    with Peer(door.port) as peer:
        peer.line()
        for byte in b"token " + TOKEN + b"\nhost a %s 1 %s\n" % (ID, SERVED):
            peer.socket.sendall(bytes([byte]))
        assert peer.line() == b"admitted a"


def test_a_stranger_who_says_nothing_is_sent_away(runtime_folder: Path) -> None:
    with opened(runtime_folder, handshake_s=-0.9) as door, Peer(door.port) as peer:
        assert peer.line() == b"torchbeast door 3"
        assert peer.is_closed()


def test_an_endless_first_line_is_cut_off_before_its_time_is_over(runtime_folder: Path) -> None:
    with opened(runtime_folder, handshake_s=1000.0) as door, Peer(door.port) as peer:
        peer.line()
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                peer.socket.sendall(b"x" * 4096)
        assert peer.is_closed()


def test_plain_text_at_a_port_of_tls_gets_no_answer(encrypted: OpenDoor) -> None:
    with Peer(encrypted.port) as peer:
        peer.say(b"token " + TOKEN, b"host a %s 1 %s" % (ID, SERVED))
        received = peer.receive(64)
        assert b"torchbeast" not in received
    assert encrypted.visits.empty()


def test_an_unfinished_tls_handshake_is_cut_off(encrypted: OpenDoor) -> None:
    with Peer(encrypted.port) as peer:
        peer.socket.sendall(b"\x16\x03\x01\x02\x00\x01")
        assert peer.is_closed()


def test_a_host_needs_a_certificate_of_the_authority_where_one_is_asked_for(
    encrypted: OpenDoor, keys: Keys, tmp_path: Path
) -> None:
    foreign = Keys(tmp_path / "foreign")
    strange = ssl.create_default_context(cafile=keys.ca)
    strange.load_cert_chain(foreign.client_cert, foreign.client_key)
    for context in (of_client(keys, own=False), strange):
        with contextlib.suppress(ssl.SSLError), Peer(encrypted.port, context) as peer:
            peer.say(b"token " + TOKEN, b"host a %s 1 %s" % (ID, SERVED))
            assert peer.line() == b""
    assert encrypted.visits.empty()
    with Peer(encrypted.port, of_client(keys)) as peer:
        assert peer.line() == b"torchbeast door 3"
        peer.say(b"token " + TOKEN, b"host a %s 1 %s" % (ID, SERVED))
        assert peer.line() == b"admitted a"


def test_hosts_check_the_name_in_the_certificate_of_the_learner(encrypted: OpenDoor) -> None:
    other = ssl.create_default_context()
    with pytest.raises(ssl.SSLCertVerificationError):
        Peer(encrypted.port, other)


def strangers(door: OpenDoor) -> int:
    """Returns how many have not shown the token yet."""
    return int(door.call(lambda: len(door.door._strangers)))


def test_strangers_beyond_the_bound_are_turned_away_and_hosts_inside_stay(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a host with one server may have one stranger more."""
    monkeypatch.setattr(door_module, "_MOST_STRANGERS_OF_ONE", 2)
    with contextlib.ExitStack() as stack:
        inside = stack.enter_context(host(door))
        wait_for(lambda: not strangers(door))
        outside = [stack.enter_context(Peer(door.port)) for _ in range(3)]
        assert all(peer.line() for peer in outside)
        with Peer(door.port) as turned_away:
            assert turned_away.is_closed()
        inside.say(b"beat")
        assert inside.line() == b"beat"
        outside[0].socket.close()
        wait_for(lambda: strangers(door) == 2)
        stack.enter_context(host(door, b"b", OTHER_ID))


@pytest.mark.parametrize("bound", ["_MOST_STRANGERS", "_MOST_STRANGERS_OF_ONE"])
def test_idle_strangers_make_room_for_hosts_the_first_one_first(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(door_module, bound, 2)
    monkeypatch.setattr(door_module, "_UNHURRIED_S", 0.0)
    with Peer(door.port) as first, Peer(door.port) as second:
        assert first.line() and second.line()
        with host(door):
            assert first.is_closed()
            second.say(b"token " + TOKEN, b"status")
            assert second.line() == b"a here 1 0 0"


def test_the_servers_of_a_host_that_is_gone_count_no_more(door: OpenDoor) -> None:
    with host(door, servers=5):
        door.visit()
        wait_for(lambda: door.call(lambda: door.door._servers.total()) == 5)
    assert not door.visit().is_here
    wait_for(lambda: door.call(lambda: door.door._servers.total()) == 0)


def test_many_servers_behind_one_address_are_not_turned_away(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_MOST_STRANGERS_OF_ONE", 1)
    monkeypatch.setattr(door_module, "_MOST_STRANGERS", 1)
    with host(door, servers=20), contextlib.ExitStack() as stack:
        wait_for(lambda: not strangers(door))
        together = [stack.enter_context(Peer(door.port)) for _ in range(21)]
        assert all(peer.line() == b"torchbeast door 3" for peer in together)
        with Peer(door.port) as beyond:
            assert beyond.is_closed()


def test_strangers_of_other_addresses_shut_out_no_connection_of_a_host_that_is_here(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a stream that is lost meanwhile could not come back."""
    monkeypatch.setattr(door_module, "_MOST_STRANGERS", 2)
    with host(door, servers=2), contextlib.ExitStack() as stack:
        address = door.visit().addresses[0]
        wait_for(lambda: door.call(lambda: door.door._servers.total()) == 2)
        wait_for(lambda: not strangers(door))
        for i in range(2):
            assert stack.enter_context(Peer(door.port, source=f"127.0.0.{2 + i}")).line()
        with Peer(door.port, source="127.0.0.4") as beyond:
            assert beyond.is_closed()
        with learner(address), spare(door) as theirs:
            assert theirs.line() == b"go"


def test_a_slow_connection_of_a_host_makes_no_room_for_strangers(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "_MOST_STRANGERS", 1)
    monkeypatch.setattr(door_module, "_UNHURRIED_S", 0.0)
    with host(door), contextlib.ExitStack() as stack:
        wait_for(lambda: door.call(lambda: door.door._servers.total()) == 1)
        wait_for(lambda: not strangers(door))
        slow = stack.enter_context(Peer(door.port))
        first = stack.enter_context(Peer(door.port, source="127.0.0.2"))
        assert slow.line() and first.line()
        assert stack.enter_context(Peer(door.port, source="127.0.0.3")).line()
        assert first.is_closed()
        slow.say(b"token " + TOKEN, b"status")
        assert slow.line() == b"a here 1 0 0"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff:ffff:ffff:ffff", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
def test_strangers_are_counted_by_address_and_in_ipv6_by_network(
    one: str, other: str, is_same: bool
) -> None:
    """Whoever has one address of IPv6 has the others of its /64 too."""
    assert (door_module._origin(one) == door_module._origin(other)) is is_same


def test_a_host_beyond_the_bound_is_asked_to_come_later(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door_module, "MOST_HOSTS", 1)
    with host(door), Peer(door.port) as peer:
        peer.line()
        peer.say(b"token " + TOKEN, b"host b %s 1 %s" % (OTHER_ID, SERVED))
        assert peer.line().startswith(b"later the learner has its 1 hosts")


@pytest.mark.parametrize("error", [(errno.EMFILE, "Too many open files"), ("path too long",)])
def test_a_host_for_which_there_are_no_sockets_has_gone_until_there_are(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch, error: tuple[Any, ...]
) -> None:
    """Its sockets are closed by then, and nobody would tell the learner later."""

    async def listen(_: object) -> None:
        raise OSError(*error)

    with host(door), Peer(door.port) as again:
        assert door.visit().is_here
        with monkeypatch.context() as patched:
            patched.setattr(place_module.ServerDoor, "listen", listen)
            again.line()
            again.say(b"token " + TOKEN, b"host a %s 1 %s" % (ID, SERVED[::-1]))
            said = again.line()
        assert said.decode() == f"later the learner's machine cannot create a socket: {error[-1]}"
        assert not door.visit().is_here
    with host(door, served=SERVED[::-1]), spare(door) as theirs:
        with learner(door.visit().addresses[0]):
            assert theirs.line() == b"go"


@pytest.mark.parametrize("length", [58, 82])
def test_a_host_with_a_long_name_is_admitted_in_a_folder_with_a_long_path(
    runtime_folder: Path, length: int
) -> None:
    """The path of a Unix socket has at most 107 bytes. A folder of 82 is the longest."""
    name = b"a-node-of-a-cluster-with-a-very-long-nam"
    folder = runtime_folder / ("x" * (length - 1 - len(str(runtime_folder))))
    folder.mkdir()
    place_module.check_room(folder)
    with opened(folder) as door:
        door.call(lambda: setattr(door.door, "_numbers", itertools.count(10**9)))
        with host(door, name), spare(door) as theirs:
            visit = door.visit()
            assert visit.label == name.decode()
            with learner(visit.addresses[0]):
                assert theirs.line() == b"go"
            (made,) = folder.iterdir()
            assert visit.label.startswith(made.name.removesuffix(".1000000000"))
            assert len(made.name) > 12 and len(str(made)) <= 107


def test_a_folder_with_too_long_a_path_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match="at most 82 bytes, and /x+ has 84: give a shorter TMP"):
        place_module.check_room(Path("/" + "x" * 83))


def test_a_host_that_has_been_away_for_long_makes_room_for_another(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines that are made for a job, and pods, have another name each time."""
    monkeypatch.setattr(door_module, "MOST_HOSTS", 2)
    monkeypatch.setattr(door_module, "_FORGOTTEN_S", 0.0)
    sockets = set()
    with host(door, b"stays", OTHER_ID):
        door.visit()
        for name in (b"a", b"b", b"a", b"c"):
            with host(door, name):
                [address] = door.visit().addresses
            assert not door.visit().is_here
            sockets.add(address)
        kept = {path.name for path in door.folder.iterdir()}
        assert len(sockets) == 4, "no other host is found where one was"
        assert len(kept) == 2 and any(name.startswith("stays.") for name in kept)


def test_a_peer_that_stalls_does_not_hold_up_others(door: OpenDoor) -> None:
    with host(door, servers=2), spare(door, 0) as stalled, spare(door, 1) as good:
        addresses = door.visit().addresses
        with Peer(door.port) as half, learner(addresses[0]) as one, learner(addresses[1]) as two:
            half.line()
            half.socket.sendall(b"token half")
            assert stalled.line() == good.line() == b"go"
            one.settimeout(0.2)
            with pytest.raises(TimeoutError):
                while True:
                    one.sendall(b"x" * MANY)
            two.sendall(b"through")
            assert good.exactly(7) == b"through"


def test_a_slow_reader_slows_the_writer_and_takes_no_memory(door: OpenDoor) -> None:
    """A gigabyte is offered, and what is taken is no more than buffers of the two sockets."""
    with host(door), spare(door) as theirs, learner(door.visit().addresses[0]) as ours:
        assert theirs.line() == b"go"
        before = psutil.Process().memory_info().rss
        ours.settimeout(0.3)
        sent, chunk = 0, b"x" * MANY
        with pytest.raises(TimeoutError):
            while sent < 1000 * MANY:
                sent += ours.send(chunk)
        assert sent < 64 * MANY
        assert psutil.Process().memory_info().rss - before < 32 * MANY
        theirs.socket.settimeout(None)
        assert len(theirs.exactly(sent)) == sent


def test_the_learner_is_turned_away_while_the_host_is_away(door: OpenDoor) -> None:
    with host(door):
        address = door.visit().addresses[0]
    assert not door.visit().is_here
    with learner(address) as ours:
        with contextlib.suppress(ConnectionError):
            assert ours.recv(1) == b""


def test_a_host_that_goes_takes_all_its_connections_along(door: OpenDoor) -> None:
    with host(door) as control, spare(door) as used, spare(door) as waiting:
        address = door.visit().addresses[0]
        with learner(address) as ours:
            assert b"go" in (used.line(),)
            control.socket.close()
            gone = door.visit()
            assert not gone.is_here and gone.why == "the other end closed the connection"
            assert ours.recv(1) == b"" and used.is_closed() and waiting.is_closed()


def test_a_host_that_comes_back_has_its_place_and_addresses_again(door: OpenDoor) -> None:
    with host(door, servers=2):
        before = door.visit().addresses
    door.visit()
    with host(door, id=OTHER_ID, servers=2), spare(door, 0, OTHER_ID) as theirs:
        again = door.visit()
        assert (again.label, again.addresses) == ("a", before)
        with learner(before[0]):
            assert theirs.line() == b"go"


@pytest.mark.parametrize(
    ("servers", "served"),
    [(1, SERVED), (3, SERVED), (2, SERVED[::-1])],
    ids=["fewer", "more", "others"],
)
def test_a_host_that_comes_back_with_other_servers_has_them_at_other_addresses(
    door: OpenDoor, servers: int, served: bytes
) -> None:
    """So that no stream of the learner reaches a server that is not the one that was described."""
    with host(door, servers=2):
        before = door.visit().addresses
    door.visit()
    with host(door, id=OTHER_ID, servers=servers, served=served), spare(door, 0, OTHER_ID) as ours:
        again = door.visit()
        assert again.label == "a" and len(set(again.addresses)) == servers
        assert not set(again.addresses) & set(before)
        with pytest.raises(FileNotFoundError):
            learner(before[0])
        with learner(again.addresses[0]):
            assert ours.line() == b"go"


def test_a_spare_connection_for_a_server_that_a_host_lacks_is_not_kept(door: OpenDoor) -> None:
    with host(door), spare(door, 1) as superfluous:
        assert superfluous.line() == b"later its host is not here"


def test_a_host_that_registers_anew_replaces_its_half_open_connection(door: OpenDoor) -> None:
    with host(door) as old, host(door) as new:
        assert [door.visit().is_here for _ in range(2)] == [True, True]
        assert old.is_closed()
        new.say(b"beat")
        assert new.line() == b"beat"
        assert door.visits.empty(), "the old connection is not the host"


def test_another_host_of_the_same_name_gets_a_number(door: OpenDoor) -> None:
    with host(door), host(door, id=OTHER_ID):
        one, two = door.visit(), door.visit()
        assert (one.label, two.label) == ("a", "a-2")
        assert not set(one.addresses) & set(two.addresses)


def test_a_spare_connection_of_nobody_is_sent_away(door: OpenDoor) -> None:
    with host(door):
        for peer in (spare(door, 0, OTHER_ID), spare(door, 1)):
            with peer:
                assert peer.line() == b"later its host is not here"
                assert peer.is_closed()


def test_a_spare_connection_that_speaks_first_is_not_used(door: OpenDoor) -> None:
    with host(door), spare(door) as rash:
        rash.socket.sendall(b"hello")
        place = door.call(lambda: door.door._places["a"].servers[0])
        wait_for(lambda: any(one.unread for one in door.call(lambda: list(place._spares))))
        with learner(door.visit().addresses[0]) as ours, spare(door) as good:
            assert rash.is_closed()
            assert good.line() == b"go"
            ours.sendall(b"x")
            assert good.exactly(1) == b"x"


def test_spare_connections_are_bounded_and_the_oldest_goes(door: OpenDoor) -> None:
    with host(door), contextlib.ExitStack() as stack:
        spares = [stack.enter_context(spare(door)) for _ in range(5)]
        place = door.call(lambda: door.door._places["a"].servers[0])
        wait_for(lambda: len(door.call(lambda: list(place._spares))) == 4)
        with learner(door.visit().addresses[0]):
            said = [peer for peer in spares if _readable(peer)]
            assert said


def _readable(peer: Peer) -> bool:
    peer.socket.settimeout(0.2)
    try:
        return peer.line() in (b"go", b"")
    except TimeoutError:
        return False


def test_unknown_words_on_the_connection_of_a_host_end_it(door: OpenDoor) -> None:
    with host(door) as control:
        door.visit()
        control.say(b"dance")
        assert "does not understand" in door.visit().why
        assert control.is_closed()


def test_a_host_that_beats_too_often_is_dropped(door: OpenDoor) -> None:
    """It would keep the door busy, and the answers would pile up."""
    with host(door) as control:
        door.visit()
        control.say(*[b"beat"] * 1000)
        assert door.visit().why == "it beats too often"


def test_beats_that_were_held_up_on_their_way_are_answered(door: OpenDoor) -> None:
    with host(door) as control:
        control.say(*[b"beat"] * 5)
        assert [control.line() for _ in range(5)] == [b"beat"] * 5


def test_a_silent_host_is_gone(door: OpenDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "SILENCE_S", 0.2)
    with host(door) as control:
        door.visit()
        control.say(b"beat")
        assert control.line() == b"beat"
        assert door.visit().why == "nothing was heard of it for 0.2 s"
        assert control.is_closed()


def test_whoever_has_the_token_may_ask_who_is_there(door: OpenDoor) -> None:
    with host(door, servers=2), Peer(door.port) as peer:
        peer.line()
        peer.say(b"token " + TOKEN, b"status")
        assert peer.line() == b"a here 2 0 0"
        assert peer.line() == b"end"
        assert peer.is_closed()


def test_hosts_are_told_when_the_learner_ends_and_sockets_go(runtime_folder: Path) -> None:
    with opened(runtime_folder) as door, host(door) as control:
        door.visit()
        assert [path.name for path in runtime_folder.iterdir()] == ["a.0"]
        door.call(door.door.say_ended)
        assert control.line() == b"ended"
        assert control.is_closed()
    assert list(runtime_folder.iterdir()) == []


def test_random_and_mutated_handshakes_never_get_in_or_stop_the_door(door: OpenDoor) -> None:
    """Connections that end in the middle, with a reset too, while a host stays inside."""
    draw = random.Random(1)
    good = b"token %s\nhost b %s 1 %s\n" % (TOKEN, OTHER_ID, SERVED)
    with host(door) as inside:
        door.visit()
        for i in range(1500):
            said = bytearray(good if i % 3 else draw.randbytes(draw.randrange(1, 3000)))
            for _ in range(draw.randrange(1, 4)):
                said[draw.randrange(min(len(said), 6 + len(TOKEN)))] ^= draw.randrange(1, 256)
            with Peer(door.port) as peer:
                if i % 5 == 0:
                    linger = struct.pack("ii", 1, 0)
                    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                with contextlib.suppress(ConnectionError):
                    peer.socket.sendall(said)
        wait_for(lambda: not strangers(door))
        inside.say(b"beat")
        assert inside.line() == b"beat"
    assert not door.visit().is_here and door.visits.empty()


def test_the_door_goes_on_after_the_system_had_no_descriptor_left(
    door: OpenDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = door.loop.sock_accept, [OSError(errno.EMFILE, "Too many open files")]

    async def without_descriptors(listener: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return await accept(listener)

    monkeypatch.setattr(door.loop, "sock_accept", without_descriptors)
    for _ in range(3):  # the first one is accepted by a call that has begun
        with Peer(door.port) as peer:
            assert peer.line() == b"torchbeast door 3"
    assert not failures


def test_a_connection_that_ended_takes_no_more(door: OpenDoor) -> None:
    async def body() -> bool:
        connection = Connection()
        connection.send(b"into the void")
        connection.close(), connection.abort()
        return connection.is_open

    assert door._run(body()).result() is False
