# SPDX-License-Identifier: Apache-2.0
"""A host stays within the learner's reach, whatever happens, or says why it cannot."""

from __future__ import annotations

import contextlib
import datetime
import queue
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from background import SOON, Background, wait_for
from doors import SERVED, TOKEN, learner, opened
from keys_of_tests import Keys, write
from serving import serving

from torchbeast import envs, status
from torchbeast.errors import RunError
from torchbeast.sources.servers.config import LearnerSecurityConfig, ServerSecurityConfig
from torchbeast.sources.servers.credentials import server_credentials
from torchbeast.sources.servers.handshake import explain
from torchbeast.sources.tunnel import dialler as dialler_module
from torchbeast.sources.tunnel import tls, way
from torchbeast.sources.tunnel.connection import Connection
from torchbeast.sources.tunnel.dialler import Dialler

pytest.importorskip("libtorchbeast._C")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "ours")


class Echo:
    """A server at a Unix socket that sends back what it gets."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                threading.Thread(target=self._echo, args=(connected,), daemon=True).start()

    @staticmethod
    def _echo(connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError):
            while data := connected.recv(1 << 16):
                connected.sendall(data)


class Dialling:
    """A dialler in a thread of its own, and what it told."""

    def __init__(self, port: int, sockets: list[str], files: LearnerSecurityConfig) -> None:
        self.told: queue.Queue[str] = queue.Queue()
        self.dialler = Dialler(f"localhost:{port}", sockets, files, self.told.put)
        self.run = Background(self.dialler.run, SERVED.decode())

    def hears(self, text: str) -> None:
        while text not in (said := self.told.get(timeout=SOON)):
            pass
        assert said

    def close(self) -> None:
        self.dialler.stop()
        self.run.result()


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[Echo]:
    with contextlib.closing(Echo(tmp_path / "echo")) as made:
        yield made


def of_host(keys: Keys, **files: str) -> LearnerSecurityConfig:
    return LearnerSecurityConfig(**({"tls_ca": keys.ca, "token_file": keys.token} | files))


def of_door(keys: Keys, **files: str) -> ssl.SSLContext | None:
    pair = {"tls_cert": keys.cert, "tls_key": keys.key}
    return tls.of_door(ServerSecurityConfig(**(pair | files)))


def echoes(address: str, data: bytes) -> None:
    """Sends data to a server as the learner would, and checks what comes back."""
    with learner(address) as ours:
        sending = Background(ours.sendall, data)
        received = b""
        while len(received) < len(data):
            chunk = ours.recv(1 << 16)
            assert chunk, "the connection ended"
            received += chunk
        assert received == data
        sending.result()


def test_the_learner_reaches_a_server_over_tls(
    runtime_folder: Path, echo: Echo, keys: Keys
) -> None:
    """One connection after the other, and several at once."""
    with opened(runtime_folder, of_door(keys)) as door:
        with contextlib.closing(Dialling(door.port, [echo.path], of_host(keys))):
            address = door.visit().addresses[0]
            for _ in range(3):
                echoes(address, bytes(range(256)) * 4000)
            together = [Background(echoes, address, b"%d" % i * 50_000) for i in range(6)]
            for one in together:
                one.result()


def test_a_host_whose_server_is_being_replaced_stays_and_serves_again(
    runtime_folder: Path, tmp_path: Path, keys: Keys
) -> None:
    path = tmp_path / "later"
    with opened(runtime_folder, of_door(keys)) as door:
        with contextlib.closing(Dialling(door.port, [str(path)], of_host(keys))):
            address = door.visit().addresses[0]
            with learner(address) as ours:
                ours.sendall(b"x")
                assert ours.recv(1) == b""
            with contextlib.closing(Echo(path)):
                echoes(address, b"again")
            assert door.visits.empty()


def test_a_host_comes_back_to_the_next_learner_at_the_same_port(
    runtime_folder: Path, echo: Echo, keys: Keys
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.closing(Dialling(port, [echo.path], of_host(keys))) as host:
        host.hears("nobody listens there now; dialling again")
        for name in ("one", "two"):
            (runtime_folder / name).mkdir()
            with opened(runtime_folder / name, of_door(keys), port=port) as door:
                host.hears("Connected to the learner")
                echoes(door.visit().addresses[0], b"hello")
                door.stop_listening()
                door.call(door.door.say_ended)
                host.hears("the learner has ended; dialling again")


def test_a_host_says_why_the_learner_does_not_use_it_and_stays(
    runtime_folder: Path, echo: Echo, keys: Keys
) -> None:
    with opened(runtime_folder, of_door(keys)) as door:
        with contextlib.closing(Dialling(door.port, [echo.path], of_host(keys))) as host:
            host.hears("Connected to the learner")
            visit = door.visit()
            for _ in range(2):  # the second time nothing is new
                door.call(lambda: door.door.tell(visit.label, "it does not use this host: no"))
            door.call(lambda: door.door.tell("another", "nothing"))
            host.hears(f"localhost:{door.port}: it does not use this host: no")
            echoes(visit.addresses[0], b"hello")
            assert host.told.empty() and door.visits.empty()


def test_a_wrong_token_ends_it_with_a_sentence(
    runtime_folder: Path, echo: Echo, keys: Keys, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", "another-token-of-this-test")
    with opened(runtime_folder, of_door(keys)) as door:
        host = Dialling(door.port, [echo.path], of_host(keys, token_file=other))
        with pytest.raises(RunError, match=f"localhost:{door.port}: this learner admits only host"):
            host.run.result()
        assert door.visits.empty()


def test_a_certificate_of_another_authority_ends_it_before_the_token_is_sent(
    runtime_folder: Path, echo: Echo, keys: Keys, tmp_path: Path
) -> None:
    foreign = Keys(tmp_path / "foreign")
    with opened(runtime_folder, of_door(foreign)) as door:
        host = Dialling(door.port, [echo.path], of_host(keys))
        with pytest.raises(RunError, match="is not signed by --tls_ca .*ca.pem"):
            host.run.result()


def test_a_missing_certificate_of_the_host_ends_it(
    runtime_folder: Path, echo: Echo, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After half a minute, because the door closes the connection without an alert."""
    with opened(runtime_folder, of_door(keys, tls_client_ca=keys.ca)) as door:
        with contextlib.closing(Dialling(door.port, [echo.path], of_host(keys))) as host:
            host.hears("dialling again")
        monkeypatch.setattr(dialler_module, "_CLOSED_S", 0.0)
        host = Dialling(door.port, [echo.path], of_host(keys))
        with pytest.raises(RunError, match="certificate, or wants one: give --tls_cert and --tls_"):
            host.run.result()
        pair = {"tls_cert": keys.client_cert, "tls_key": keys.client_key}
        with contextlib.closing(Dialling(door.port, [echo.path], of_host(keys, **pair))):
            echoes(door.visit().addresses[0], b"mutual")


@pytest.fixture
def hanging_up() -> Iterator[socket.socket]:
    """Accepts connections and closes them, as a tunnel to a learner that is away does."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                listener.accept()[0].close()

    listener = socket.create_server(("127.0.0.1", 0))
    serving = Background(serve)
    try:
        yield listener
    finally:
        with contextlib.suppress(OSError):  # the test has closed it
            listener.shutdown(socket.SHUT_RDWR)
        serving.result()
        listener.close()


def test_connections_that_are_closed_at_once_are_tried_until_the_learner_is_there(
    runtime_folder: Path,
    hanging_up: socket.socket,
    echo: Echo,
    keys: Keys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dialler_module, "_CLOSED_S", 0.0)
    port = hanging_up.getsockname()[1]
    with contextlib.closing(Dialling(port, [echo.path], of_host(keys))) as host:
        host.hears("dialling again")
        hanging_up.shutdown(socket.SHUT_RDWR)
        hanging_up.close()
        with opened(runtime_folder, of_door(keys), port=port) as door:
            host.hears("Connected to the learner")
            echoes(door.visit().addresses[0], b"hello")


def test_a_learner_that_was_there_is_awaited_however_its_port_answers(
    runtime_folder: Path, echo: Echo, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even by TLS that ends after the handshake, as before a learner that is away."""
    monkeypatch.setattr(dialler_module, "_CLOSED_S", 0.0)
    explained: queue.Queue[str] = queue.Queue()

    def noting(*args: Any, **options: Any) -> None:
        try:
            explain(*args, **options)
        except RunError as error:
            explained.put(str(error))
            raise

    monkeypatch.setattr("torchbeast.sources.tunnel.way.explain", noting)
    wanting = of_door(keys, tls_client_ca=keys.ca)
    (runtime_folder / "one").mkdir(), (runtime_folder / "two").mkdir()
    with opened(runtime_folder / "one", of_door(keys)) as door:
        host = Dialling(door.port, [echo.path], of_host(keys))
        host.hears("Connected to the learner")
    with contextlib.closing(host):
        with opened(runtime_folder / "two", wanting, port=door.port):
            host.hears("dialling again")
            for _ in range(2):
                explained.get(timeout=SOON)
        with opened(runtime_folder, of_door(keys), port=door.port):
            host.hears("Connected to the learner")


@pytest.mark.parametrize("encrypted", [True, False])
def test_another_program_at_the_port_of_a_learner_that_was_there_is_told_and_awaited(
    runtime_folder: Path, echo: Echo, keys: Keys, encrypted: bool
) -> None:
    """Otherwise one wrong start on the learner's machine would end all hosts."""
    files, why = of_host(keys), "that port does not use TLS: start what listens there"
    if not encrypted:
        files = LearnerSecurityConfig(insecure=True, token_file=keys.token)
        why = "that port belongs to another program"
    (runtime_folder / "one").mkdir()
    door_tls = of_door(keys) if encrypted else None
    with opened(runtime_folder / "one", door_tls) as door:
        host = Dialling(door.port, [echo.path], files)
        host.hears("Connected to the learner")
    with contextlib.closing(host):
        with another_program(door.port):
            host.hears(why)
        with opened(runtime_folder, door_tls, port=door.port) as door:
            host.hears("Connected to the learner")
            echoes(door.visit().addresses[0], b"hello")


@contextlib.contextmanager
def another_program(port: int) -> Iterator[None]:
    """Listens at a port and greets as no door does."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as connected, contextlib.suppress(ConnectionError):
                    connected.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socket.create_server(("127.0.0.1", port)) as listener:
        serving = Background(serve)
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.result()


def test_a_wrong_token_after_an_admission_is_told_and_the_renewed_one_is_used(
    runtime_folder: Path, echo: Echo, tmp_path: Path
) -> None:
    """A learner that was started with another token may not keep it, or the host gets it later."""
    keys = Keys(tmp_path / "keys")
    (runtime_folder / "one").mkdir()
    with opened(runtime_folder / "one", of_door(keys)) as door:
        host = Dialling(door.port, [echo.path], of_host(keys))
        host.hears("Connected to the learner")
        write(Path(keys.token), "another-token-of-this-test")
    with contextlib.closing(host), opened(runtime_folder, of_door(keys), port=door.port):
        host.hears("this learner admits only hosts with its token")
        write(Path(keys.token), TOKEN)
        host.hears("Connected to the learner")


@pytest.mark.parametrize("name", ["ca", "client_cert", "client_key", "token"])
def test_a_file_that_is_being_copied_ends_no_host_and_is_used_once_it_is_whole(
    runtime_folder: Path, echo: Echo, tmp_path: Path, name: str
) -> None:
    keys = Keys(tmp_path / "keys")
    pair = {"tls_cert": keys.client_cert, "tls_key": keys.client_key}
    path = str(getattr(keys, name))
    whole = Path(path).read_bytes()
    (runtime_folder / "one").mkdir()
    with opened(runtime_folder / "one", of_door(keys)) as door:
        host = Dialling(door.port, [echo.path], of_host(keys, **pair))
        host.hears("Connected to the learner")
        write(Path(path), whole[: min(200, len(whole) // 2)])
    with contextlib.closing(host), opened(runtime_folder, of_door(keys), port=door.port):
        host.hears(path)
        write(Path(path), whole)
        host.hears("Connected to the learner")


def test_a_host_whose_certificate_has_expired_says_so_and_uses_the_renewed_one(
    runtime_folder: Path, echo: Echo, tmp_path: Path
) -> None:
    """The renewed one is of another authority, so that the one before would not do."""
    keys, renewed = Keys(tmp_path / "keys"), Keys(tmp_path / "renewed")
    pair = {"tls_cert": keys.client_cert, "tls_key": keys.client_key}
    names = [(keys.ca, renewed.ca), (keys.client_key, renewed.client_key)]
    names.append((keys.client_cert, renewed.client_cert))
    (runtime_folder / "one").mkdir()
    with opened(runtime_folder / "one", of_door(keys, tls_client_ca=keys.ca)) as door:
        host = Dialling(door.port, [echo.path], of_host(keys, **pair))
        host.hears("Connected to the learner")
        keys.client(datetime.timedelta(days=-3), "client")
    with contextlib.closing(host):
        host.hears(f"--tls_cert {keys.client_cert} has expired")
        for old, new in names:
            write(Path(old), Path(new).read_bytes())
        door_tls = of_door(renewed, tls_client_ca=renewed.ca)
        with opened(runtime_folder, door_tls, port=door.port) as door:
            host.hears("Connected to the learner")
            echoes(door.visit().addresses[0], b"hello")


def test_a_connection_in_reserve_that_cannot_be_had_says_why(
    runtime_folder: Path, echo: Echo, tmp_path: Path
) -> None:
    """The host stays connected, and would lack streams without a word."""
    keys = Keys(tmp_path / "keys")
    with opened(runtime_folder, of_door(keys)) as door:
        with contextlib.closing(Dialling(door.port, [echo.path], of_host(keys))) as host:
            visit = door.visit()
            address = visit.addresses[0]
            place = door.call(lambda: door.door._places[visit.label].servers[0])
            wait_for(lambda: door.call(lambda: len(place._spares)) == 1)
            write(Path(keys.token), "too short")
            with learner(address):
                host.hears(f"--token_file {keys.token} must contain one word")
            write(Path(keys.token), TOKEN)
            echoes(address, b"again")
            assert door.visits.empty(), "the host stayed"


def test_a_host_that_starts_before_names_are_resolved_waits_for_them(
    runtime_folder: Path, echo: Echo, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that boots before its network."""

    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    with opened(runtime_folder, of_door(keys)) as door:
        with monkeypatch.context() as patched:
            patched.setattr(socket, "getaddrinfo", fails)
            host = Dialling(door.port, [echo.path], of_host(keys))
            host.hears(f"localhost:{door.port}: Temporary failure in name resolution; dialling")
        with contextlib.closing(host):
            host.hears("Connected to the learner")


def test_plain_tcp_and_tls_that_meet_are_told_apart(
    runtime_folder: Path, echo: Echo, keys: Keys
) -> None:
    plain = LearnerSecurityConfig(insecure=True, token_file=keys.token)
    with opened(runtime_folder, of_door(keys)) as door:
        with pytest.raises(RunError, match="that port uses TLS: give --tls_ca"):
            Dialling(door.port, [echo.path], plain).run.result()
    with opened(runtime_folder) as door:
        with pytest.raises(RunError, match="that port does not use TLS: start what listens there"):
            Dialling(door.port, [echo.path], of_host(keys)).run.result()
        with contextlib.closing(Dialling(door.port, [echo.path], plain)):
            echoes(door.visit().addresses[0], b"plain")


def test_the_port_of_another_program_is_named_and_gets_no_token(echo: Echo, keys: Keys) -> None:
    heard: queue.Queue[bytes] = queue.Queue()

    def serve(listener: socket.socket) -> None:
        for _ in range(2):  # a look at whether it uses TLS, and the call itself
            connected, _ = listener.accept()
            with connected, contextlib.suppress(ConnectionError):
                connected.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                while data := connected.recv(4096):
                    heard.put(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = Background(serve, listener)
        plain = LearnerSecurityConfig(insecure=True, token_file=keys.token)
        host = Dialling(listener.getsockname()[1], [echo.path], plain)
        with pytest.raises(RunError, match="that port belongs to another program"):
            host.run.result()
        serving.result()
    assert not any(TOKEN in said for said in heard.queue)


@pytest.mark.parametrize("mutual", [False, True])
def test_the_port_of_environment_servers_is_named_at_once(
    echo: Echo, keys: Keys, mutual: bool
) -> None:
    """They speak gRPC over the same TLS, so the certificate is accepted."""
    client_ca = {"tls_client_ca": keys.ca} if mutual else {}
    files = ServerSecurityConfig(tls_cert=keys.cert, tls_key=keys.key, **client_ca)
    with env_server(files) as port:
        host = Dialling(port, [echo.path], of_host(keys))
        with pytest.raises(RunError, match=f"localhost:{port}: that port belongs to another prog"):
            host.run.result()


def test_the_port_of_environment_servers_without_tls_is_named(
    echo: Echo, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(way, "_LINE_S", 0.2)
    plain = LearnerSecurityConfig(insecure=True, token_file=keys.token)
    with env_server(ServerSecurityConfig(insecure=True)) as port:
        host = Dialling(port, [echo.path], plain)
        with pytest.raises(RunError, match="that port belongs to another program"):
            host.run.result()


def test_a_door_that_says_its_line_slowly_is_one(
    echo: Echo, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: queue.Queue[bytes] = queue.Queue()

    def head(connection: Connection) -> bytes:
        looks.put(bytes(connection._unread))
        return bytes(connection._unread)

    monkeypatch.setattr(way, "_LINE_S", 0.5)
    monkeypatch.setattr(Connection, "head", property(head))
    plain = LearnerSecurityConfig(insecure=True, token_file=keys.token)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with contextlib.closing(Dialling(listener.getsockname()[1], [echo.path], plain)):
            listener.accept()[0].close()  # a look at whether it uses TLS
            with listener.accept()[0] as connected:
                connected.sendall(b"torchbeast")
                assert b"torchbeast".startswith(looks.get(timeout=SOON))
                connected.sendall(b" door 3\n")
                assert connected.recv(1000).startswith(b"token ")


@contextlib.contextmanager
def env_server(files: ServerSecurityConfig) -> Iterator[int]:
    """Serves an environment for learners that connect; yields the port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    credentials = server_credentials(files)
    with serving(lambda: envs.make("Catch", 1), f"127.0.0.1:{port}", credentials=credentials):
        yield port


def test_an_unknown_name_ends_it(echo: Echo, keys: Keys) -> None:
    dialler = Dialler("no-such-host.invalid:1", [echo.path], of_host(keys), print)
    with pytest.raises(RunError, match="no-such-host.invalid is unknown on this machine"):
        dialler.run(SERVED.decode())


def test_a_learner_that_falls_silent_is_dialled_again(
    runtime_folder: Path, echo: Echo, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pulled cable: bytes of the old connections end, and new ones take over."""
    monkeypatch.setattr(dialler_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(dialler_module, "BEAT_S", 100.0)
    with opened(runtime_folder, of_door(keys)) as door:
        with contextlib.closing(Dialling(door.port, [echo.path], of_host(keys))) as host:
            with learner(door.visit().addresses[0]) as ours:
                ours.sendall(b"x")
                assert ours.recv(1) == b"x"
                host.hears("nothing was heard of the learner for 0.2 s; dialling again")
                assert ours.recv(1) == b""
            host.hears("Connected to the learner")


def test_it_stops_while_it_dials_and_leaves_no_thread(echo: Echo, keys: Keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        before = threading.active_count()
        plain = LearnerSecurityConfig(insecure=True)
        host = Dialling(deaf.getsockname()[1], [echo.path], plain)
        connected, _ = deaf.accept()
        connected.close()
        second, _ = deaf.accept()
        with second:
            host.close()
        wait_for(lambda: threading.active_count() <= before)


def test_the_hosts_of_a_learner_are_shown(
    runtime_folder: Path, echo: Echo, keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    files = ["--tls_ca", keys.ca, "--token_file", keys.token]
    with opened(runtime_folder, of_door(keys)) as door:
        where = ["--learner", f"localhost:{door.port}", *files]
        assert status.main(where) == 0
        assert capsys.readouterr().out == "no host has dialled in yet\n"
        with contextlib.closing(Dialling(door.port, [echo.path], of_host(keys))):
            visit = door.visit()
            with learner(visit.addresses[0]) as ours:
                ours.sendall(b"x")
                assert ours.recv(1) == b"x"
                assert status.main(where) == 0
        said = capsys.readouterr().out.splitlines()
        assert said[0].split() == ["host", "state", "servers", "connections", "for"]
        assert said[1].split()[:4] == [visit.label, "here", "1", "1"]
        assert re.fullmatch(r"0:0\d:\d\d", said[1].split()[4])


def test_a_learner_that_does_not_tell_its_hosts_is_a_failure(
    runtime_folder: Path, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "other", "another-token-of-this-test")
    with opened(runtime_folder, of_door(keys)) as door:
        where = ["--learner", f"localhost:{door.port}", "--tls_ca", keys.ca]
        assert status.main([*where, "--token_file", other]) == 1
        assert "this learner admits only hosts with its token" in capsys.readouterr().err
    assert status.main([*where, "--token_file", keys.token]) == 1
    why = f"no learner answers at localhost:{door.port} (nobody listens there now)"
    assert why in capsys.readouterr().err
