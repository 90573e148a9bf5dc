# SPDX-License-Identifier: Apache-2.0
"""A program whose own certificate is not valid at present says so when it starts, because the other
side would only close the connection. A program that listens tells others how to reach it.
"""

from __future__ import annotations

import datetime
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from keys_of_tests import Keys, valid_from, write

from torchbeast import polybeast_env, polybeast_learner, status
from torchbeast.errors import UsageError
from torchbeast.keys import new_authority
from torchbeast.sources.servers.config import SecurityConfig
from torchbeast.sources.servers.security import credentials, flags_of_others

DAY = datetime.timedelta(days=1)
MINUTE = datetime.timedelta(minutes=1)
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d UTC"
AUTHORITY_LASTS = 3650 * DAY


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys"))


def of_server(keys: Keys, since: datetime.timedelta) -> SecurityConfig:
    cert, key = keys.server(since=since, name="own")
    return SecurityConfig(tls_cert=cert, tls_key=key, token_file=keys.token)


def of_learner(keys: Keys, since: datetime.timedelta) -> SecurityConfig:
    cert, key = keys.client(since, "own")
    return SecurityConfig(tls_ca=keys.ca, tls_cert=cert, tls_key=key)


both_sides = pytest.mark.parametrize("side", [of_server, of_learner])
Side = Callable[[Keys, datetime.timedelta], SecurityConfig]


@both_sides
@pytest.mark.parametrize("since", [-DAY / 2, 4 * MINUTE], ids=["valid", "other clock"])
def test_a_certificate_that_is_valid_now_or_made_by_a_clock_ahead_passes(
    keys: Keys, side: Side, since: datetime.timedelta
) -> None:
    credentials(side(keys, since))


@both_sides
@pytest.mark.parametrize(
    ("since", "text"),
    [
        (-DAY - 61 * MINUTE, "has expired: it"),
        (10 * MINUTE, "is not valid yet: it"),
    ],
    ids=["expired", "early"],
)
def test_a_certificate_that_is_not_valid_is_refused_with_its_times_and_ours(
    keys: Keys, side: Side, since: datetime.timedelta, text: str
) -> None:
    given = side(keys, since)
    with pytest.raises(UsageError) as error:
        credentials(given)
    now = datetime.datetime.now(datetime.timezone.utc)
    begins, ends = (f"{now + since + after:%Y-%m-%d}" for after in (0 * DAY, DAY + 60 * MINUTE))
    said = str(error.value)
    assert re.match(
        rf"--tls_cert {given.tls_cert} {text} is valid from {begins} .* to {ends} .*, and the "
        rf"clock of this machine says {now:%Y-%m-%d}",
        said,
    ), said
    assert len(re.findall(TIME, said)) == 3 and "set the clock, or make new ones with" in said


def authority(keys: Keys, path: Path, *since: datetime.timedelta) -> SecurityConfig:
    made = b""
    for each in since:
        with valid_from(each):
            made += new_authority().certificate_pem()
    return SecurityConfig(
        tls_cert=keys.cert, tls_key=keys.key, tls_client_ca=write(path / "ca.pem", made)
    )


def test_an_authority_that_has_expired_is_refused(keys: Keys, tmp_path: Path) -> None:
    given = authority(keys, tmp_path, -AUTHORITY_LASTS - DAY)
    with pytest.raises(UsageError, match="--tls_client_ca .*ca.pem has expired: .* another --fol"):
        credentials(given)
    with pytest.raises(UsageError, match="--tls_ca .*ca.pem has expired: .* another --folder"):
        credentials(SecurityConfig(tls_ca=given.tls_client_ca))


@pytest.mark.parametrize("other", [-AUTHORITY_LASTS - DAY, DAY], ids=["old", "next"])
def test_one_valid_authority_among_those_of_a_file_suffices(
    keys: Keys, tmp_path: Path, other: datetime.timedelta
) -> None:
    credentials(authority(keys, tmp_path, other, -DAY))
    credentials(authority(keys, tmp_path, -DAY, other))


PROGRAMS = {
    "polybeast_env --listen": (polybeast_env.main, of_server, ["--env", "Catch", "--listen"]),
    "polybeast_env --learner": (polybeast_env.main, of_learner, ["--env", "Catch", "--learner"]),
    "polybeast_learner --listen": (polybeast_learner.main, of_server, ["--listen"]),
    "polybeast_learner --env_servers": (polybeast_learner.main, of_learner, ["--env_servers"]),
    "status HOST:PORT": (status.main, of_learner, []),
    "status --learner": (status.main, of_learner, ["--learner"]),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_so_before_it_does_anything(
    keys: Keys,
    program: str,
    tmp_path: Path,
    runtime_folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main, side, words = PROGRAMS[program]
    files = side(keys, -3 * DAY)
    flags = {"tls_cert", "tls_key", "tls_ca", "tls_client_ca", "token_file"}
    given = [f"--{flag}={path}" for flag, path in vars(files).items() if flag in flags and path]
    runs = ["--savedir", str(tmp_path)] if main is polybeast_learner.main else []
    assert main([*words, "127.0.0.1:1", *given, *runs]) == 2
    said = capsys.readouterr()
    assert "own.pem has expired: it is valid from" in said.err and said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_others_are_told_the_name_of_this_machine_in_place_of_every_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    listen = ["0.0.0.0:1", "[::]:2", "10.0.0.1:3"]
    said = flags_of_others("--learner", listen, SecurityConfig(insecure=True))
    assert said.startswith("--learner node7:1,node7:2,10.0.0.1:3 ")


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ({"insecure": True}, "--insecure"),
        ({"insecure": True, "token_file": "a token"}, "--insecure --token_file token"),
        (
            {"tls_cert": "c", "tls_key": "k", "token_file": "t"},
            "--tls_ca ca.pem --token_file token",
        ),
        (
            {"tls_cert": "c", "tls_key": "k", "tls_client_ca": "ca"},
            "--tls_ca ca.pem --tls_cert client.pem --tls_key client-key.pem",
        ),
    ],
)
def test_the_flags_of_the_other_side_fit_those_of_this_one(
    own: dict[str, Any], others: str
) -> None:
    said = flags_of_others("--learner", ["a:1", "a:2"], SecurityConfig(**own))
    assert said == f"--learner a:1,a:2 {others}"


def test_without_cryptography_the_extra_is_named(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    credentials(SecurityConfig(insecure=True))
    with pytest.raises(UsageError, match=r"pip install 'torchbeast\[tls\]'"):
        credentials(of_server(keys, -DAY / 2))
