# SPDX-License-Identifier: Apache-2.0
"""Nobody without the right token or certificate gets an environment. The clients are grpcio's."""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import wire
from background import SOON, wait_for
from keys_of_tests import TOKEN, Keys
from peers import SERVICE
from ports import free_port
from served_envs import Counting, Vector
from serving import playing, serving

from libtorchbeast import Credentials, describe, server_status
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.security import credentials as credentials_of

METHODS = ["StreamingEnv", "StreamingVectorEnv", "Describe", "GetStatus", "Check"]
SERVICES = {"GetStatus": "rpcenv.RPCServerStatus", "Check": "grpc.health.v1.Health"}
Metadata = Sequence[tuple[str, str]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "ours")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """The files of another authority."""
    return Keys(tmp_path_factory.mktemp("keys") / "foreign")


@pytest.fixture
def tcp() -> str:
    """Returns an address on the loopback without a server."""
    return f"127.0.0.1:{free_port()}"


class Factory:
    """Makes environments and counts them."""

    def __init__(self, env_class: Any = Counting) -> None:
        self.made = 0
        self._env_class = env_class

    def __call__(self) -> Any:
        self.made += 1
        return self._env_class()


def code_of(channel: grpc.Channel, method: str, metadata: Metadata = ()) -> grpc.StatusCode:
    """Returns the status of a call for which the client never sends a message."""
    call = channel.stream_stream(f"/{SERVICES.get(method, SERVICE)}/{method}")
    never_ends = Unending()
    answers = call(never_ends, metadata=metadata, timeout=SOON, wait_for_ready=False)
    try:
        with contextlib.suppress(grpc.RpcError):
            next(answers)
            return grpc.StatusCode.OK
        return answers.code()
    finally:
        answers.cancel()
        never_ends.end()


class Unending:
    """Requests that do not come until the end."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()

    def __iter__(self) -> Unending:
        return self

    def __next__(self) -> bytes:
        self._reader.recv(1)
        raise StopIteration

    def end(self) -> None:
        self._writer.close()


REFUSED = {
    "none": (),
    "empty": (("authorization", ""),),
    "no scheme": (("authorization", TOKEN),),
    "another scheme": (("authorization", f"Basic {TOKEN}"),),
    "another": (("authorization", f"Bearer {TOKEN.swapcase()}"),),
    "its beginning": (("authorization", f"Bearer {TOKEN[:-1]}"),),
    "and more": (("authorization", f"Bearer {TOKEN}x"),),
    "twice": (("authorization", f"Bearer {TOKEN}"),) * 2,
    "in another header": (("token", TOKEN),),
}


@pytest.mark.parametrize("method", METHODS)
def test_without_the_token_a_client_is_refused_before_it_has_sent_a_message(
    method: str, address: str
) -> None:
    """A message may have 256 MiB, which nobody unknown may make the server read."""
    make = Factory()
    with serving(make, address, credentials=Credentials(token=TOKEN)):
        with grpc.insecure_channel(address) as channel:
            for case, metadata in REFUSED.items():
                assert code_of(channel, method, metadata) == grpc.StatusCode.UNAUTHENTICATED, case
    assert make.made == 0


def test_with_the_token_the_original_stream_plays(address: str) -> None:
    with serving(Counting, address, credentials=Credentials(token=TOKEN)):
        with grpc.insecure_channel(address) as channel:
            right = [("authorization", f"Bearer {TOKEN}")]
            assert code_of(channel, "StreamingEnv", right) == grpc.StatusCode.OK


def test_a_wrong_token_is_a_permission_error_that_says_what_to_do(address: str) -> None:
    with serving(Counting, address, credentials=Credentials(token=TOKEN)):
        for wrong in (None, Credentials(token="another-token-altogether")):
            for ask in (describe, server_status):
                with pytest.raises(PermissionError, match=f"{address}.*--token_file") as error:
                    ask(address, SOON, credentials=wrong)
                assert TOKEN not in str(error.value)


def test_credentials_do_not_show_their_secrets() -> None:
    secret = Credentials(ca="my ca", certificate="my cert", key="my key", token=TOKEN)
    assert repr(secret) == "Credentials(ca=True, certificate=True, key=True, token=True)"
    assert repr(Credentials()) == "Credentials(ca=False, certificate=False, key=False, token=False)"
    with pytest.raises(ValueError, match="printable ASCII") as error:
        Credentials(token="secret words")
    assert "words" not in str(error.value)


@pytest.mark.parametrize("env_class", [Counting, Vector])
def test_a_learner_plays_over_tls_with_certificates_of_both_and_a_token(
    keys: Keys, tcp: str, env_class: Any
) -> None:
    server, learner = mutual(keys)
    with serving(env_class, tcp, credentials=server):
        assert describe(tcp, SOON, learner)["num_streams"] == 1
        with playing([tcp], credentials=learner) as game:
            game.rollouts(3)
            assert server_status(tcp, SOON, learner)["open_streams"] == 1


def mutual(keys: Keys) -> tuple[Credentials, Credentials]:
    """Returns the credentials of a server and of a learner that check each other."""
    server = SecurityConfig(
        tls_cert=keys.cert, tls_key=keys.key, tls_client_ca=keys.ca, token_file=keys.token
    )
    learner = SecurityConfig(
        tls_ca=keys.ca, tls_cert=keys.client_cert, tls_key=keys.client_key, token_file=keys.token
    )
    return credentials_of(server), credentials_of(learner)


@contextlib.contextmanager
def secure(address: str, ca: str, pair: tuple[str, str] | None = None) -> Iterator[grpc.Channel]:
    """Opens a channel of grpcio over TLS."""
    texts = [Path(name).read_bytes() for name in pair or ()]
    root = Path(ca).read_bytes()
    with grpc.secure_channel(
        address, grpc.ssl_channel_credentials(root, *reversed(texts))
    ) as channel:
        yield channel


def test_only_a_client_with_tls_and_a_certificate_of_the_authority_gets_an_environment(
    keys: Keys, foreign: Keys, tcp: str
) -> None:
    make, right = Factory(), [("authorization", f"Bearer {TOKEN}")]
    ours, theirs = (keys.client_cert, keys.client_key), (foreign.client_cert, foreign.client_key)
    expired = keys.client(-datetime.timedelta(days=3), "expired")
    with serving(make, tcp, credentials=mutual(keys)[0]):
        with grpc.insecure_channel(tcp) as plain:
            assert code_of(plain, "StreamingEnv", right) == grpc.StatusCode.UNAVAILABLE
        for pair in (None, theirs, expired):
            with secure(tcp, keys.ca, pair) as channel:
                assert code_of(channel, "StreamingEnv", right) == grpc.StatusCode.UNAVAILABLE
        with secure(tcp, keys.ca, ours) as channel:
            assert code_of(channel, "StreamingEnv") == grpc.StatusCode.UNAUTHENTICATED
            assert make.made == 0
            assert code_of(channel, "StreamingEnv", right) == grpc.StatusCode.OK
    assert make.made == 1


def test_a_learner_sends_its_token_to_no_server_that_it_does_not_trust(
    keys: Keys, foreign: Keys, tcp: str
) -> None:
    """The server of another authority counts as an impostor: it gets no call at all."""
    impostor, learner = mutual(foreign)[0], mutual(keys)[1]
    make = Factory()
    with serving(make, tcp, credentials=impostor):
        with pytest.raises(TimeoutError, match=tcp):
            describe(tcp, 1.0, learner)
    assert make.made == 0


def test_a_certificate_of_a_learner_makes_nobody_a_server(keys: Keys, tcp: str) -> None:
    stolen = SecurityConfig(tls_cert=keys.client_cert, tls_key=keys.client_key)
    with serving(Counting, tcp, credentials=credentials_of(stolen)):
        with pytest.raises(TimeoutError, match=tcp):
            describe(tcp, 1.0, mutual(keys)[1])


def test_the_name_in_the_certificate_can_differ_from_the_address(keys: Keys, tcp: str) -> None:
    from cryptography import x509

    pair = keys.server([x509.DNSName("actors.lab")], name="named")
    server = credentials_of(SecurityConfig(tls_cert=pair[0], tls_key=pair[1]))
    learner = credentials_of(SecurityConfig(tls_ca=keys.ca))
    with serving(Counting, tcp, credentials=server):
        assert describe(f"actors.lab@{tcp}", SOON, learner)["num_envs"] == 1
        with playing([f"actors.lab@{tcp}"], credentials=learner) as game:
            game.rollout()
        for wrong in (tcp, f"other.lab@{tcp}"):
            with pytest.raises(TimeoutError):
                describe(wrong, 1.0, learner)


def test_a_server_whose_ca_has_no_certificate_beside_it_cannot_be_run(keys: Keys, tcp: str) -> None:
    half = Credentials(ca=Path(keys.ca).read_text())
    with pytest.raises(ValueError, match=f"{tcp}.*needs a certificate"):
        with serving(Counting, tcp, credentials=half):
            pass


def test_health_is_answered_in_grpcs_standard_way(address: str) -> None:
    with serving(Counting, address):
        with grpc.insecure_channel(address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            serving_status = wire.number(1, 1)
            for known in ("", "rpcenv.RPCEnvServer", "rpcenv.RPCServerStatus"):
                assert check(wire.chunk(1, known.encode()), timeout=SOON) == serving_status
            with pytest.raises(grpc.RpcError) as unknown:
                check(wire.chunk(1, b"rpcenv.Other"), timeout=SOON)
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_the_status_counts_streams_and_steps(address: str) -> None:
    with serving(Vector, address):
        before = server_status(address, SOON)
        assert before["open_streams"] == 0 and before["steps"] == 0 and before["uptime_s"] >= 0
        with playing([address], unroll_length=4) as game:
            game.rollouts(2)
            busy = server_status(address, SOON)
        assert busy["open_streams"] == 1
        assert busy["steps"] >= 2 * 4 * Vector.num_envs and busy["steps"] % Vector.num_envs == 0


def test_a_pool_takes_credentials_for_all_its_servers(address: str) -> None:
    def agent(inputs: Any) -> Any:
        (_, reward, *_), _ = inputs
        return (np.zeros(tuple(reward.shape), np.int64),), ()

    secret = Credentials(token=TOKEN)
    with serving(Counting, address, credentials=secret):
        with playing([address, address], agent, credentials=secret) as game:
            game.rollouts(4)
            wait_for(lambda: game.pool.live_streams() == 2)


def test_a_server_that_comes_back_with_another_token_is_away_until_it_has_the_old_one(
    address: str,
) -> None:
    make, secret, renewed = Factory(), Credentials(token=TOKEN), Credentials(token=f"{TOKEN}-new")
    with contextlib.ExitStack() as others:
        other = f"{address}2"
        others.enter_context(serving(Counting, other, credentials=secret))
        with serving(Counting, address, credentials=secret):
            game = others.enter_context(playing([address, other], credentials=secret))
            game.rollouts(2)
            wait_for(lambda: game.pool.live_streams() == 2)
        with serving(make, address, credentials=renewed):
            for _ in range(20):
                game.rollout()  # of the other server
            wait_for(lambda: [name for name, *_ in game.pool.away_streams()] == [address])
            wait_for(lambda: game.pool.away_streams()[0][2].startswith("this is not its token"))
        assert make.made == 0
        with serving(make, address, credentials=secret):
            while game.pool.live_streams() < 2:
                game.rollout()
            assert game.pool.away_streams() == []
        assert make.made > 0


def test_a_server_that_comes_back_with_another_environment_ends_the_run(address: str) -> None:
    with contextlib.ExitStack() as stack:
        with serving(Counting, address, env_id="Pong"):
            game = stack.enter_context(playing([address]))
            game.rollout()
        stack.enter_context(serving(Counting, address, env_id="Breakout"))
        with pytest.raises(
            ValueError, match=f"{address}: .*is Breakout, before it was Pong: start"
        ):
            while True:
                game.rollout()
        with pytest.raises(ValueError, match="Breakout"):
            stack.close()
