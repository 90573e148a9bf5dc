# SPDX-License-Identifier: Apache-2.0
"""Servers and learners that have IPv6 alone, by whole programs over TLS with a token."""

from __future__ import annotations

import ipaddress
import signal
import socket
from pathlib import Path

import pytest
from cryptography import x509
from ipv6 import HOME, needs_ipv6
from keys_of_tests import Keys
from programs import Workshop
from test_machines import of_learner, of_servers

SMALL = ["--batch_size", "2", "--unroll_length", "10", "--torch_threads", "1", "--xpid", "a"]


pytestmark = [pytest.mark.long, needs_ipv6]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """Returns keys whose server is known by its IPv6 address, and by no name."""
    keys = Keys(tmp_path / "keys")
    named = [x509.IPAddress(ipaddress.ip_address(HOME))]
    keys.cert, keys.key = keys.server(named, name="six")
    return keys


@pytest.fixture
def address() -> str:
    with socket.create_server((HOME, 0), family=socket.AF_INET6) as free:
        return f"[{HOME}]:{free.getsockname()[1]}"


def test_a_learner_reaches_servers_at_an_ipv6_address(
    workshop: Workshop, keys: Keys, address: str
) -> None:
    where = ["--listen", address, "--num_servers", "1", *of_servers(keys)]
    servers = workshop.start("polybeast_env", "--env", "Catch", "--num_envs", "2", *where)
    servers.wait_for(rf"--env_servers '?{address}'? --tls_ca".replace("[", r"\[", 1))
    learner = workshop.start(
        *("polybeast_learner", *SMALL, "--env_servers", address, *of_learner(keys)),
        *("--total_steps", "2000"),
    )
    assert learner.end() == 0, learner.said
    code, shown = workshop.run("status", address, *of_learner(keys))
    assert code == 0 and address in shown and "Catch" in shown, shown
    servers.send(signal.SIGINT)
    assert servers.end() == 0, servers.said


def test_a_host_dials_in_at_an_ipv6_address(workshop: Workshop, keys: Keys, address: str) -> None:
    host = workshop.start(
        *("polybeast_env", "--env", "Catch", "--num_servers", "1", "--num_envs", "2"),
        *("--learner", address, *of_learner(keys)),
    )
    learner = workshop.start(
        *("polybeast_learner", *SMALL, "--listen", address, *of_servers(keys)),
        *("--total_steps", "2000", "--connect_timeout", "100"),
    )
    assert learner.end() == 0, learner.said
    assert host.end() == 0, host.said
