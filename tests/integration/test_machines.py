# SPDX-License-Identifier: Apache-2.0
"""Environment servers and a learner over TCP, as on several machines."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from background import wait_for
from ipv6 import needs_ipv6
from keys_of_tests import TOKEN, Keys
from later import later
from ports import free_ports
from programs import BUSY_S, MARKED, ONE_INCARNATION, SOON, Program, Workshop
from serving import serving

import libtorchbeast
from torchbeast import polybeast_env, polybeast_learner, status
from torchbeast.envs import make
from torchbeast.reporting.log_files import read_logs


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


def of_servers(keys: Keys) -> list[str]:
    """Returns the flags of servers that check learners by certificate and token."""
    pair = ["--tls_cert", keys.cert, "--tls_key", keys.key]
    return [*pair, "--tls_client_ca", keys.ca, "--token_file", keys.token]


def of_learner(keys: Keys) -> list[str]:
    pair = ["--tls_cert", keys.client_cert, "--tls_key", keys.client_key]
    return [*pair, "--tls_ca", keys.ca, "--token_file", keys.token]


@pytest.mark.long
def test_a_learner_and_two_hosts_learn_over_tls_and_tell_no_secret(
    workshop: Workshop, keys: Keys
) -> None:
    """One host has two servers."""
    first = free_ports(3)
    hosts = [f"localhost:{first}", f"127.0.0.1:{first + 2}"]
    for address, count, envs in zip(hosts, (2, 1), (12, 4), strict=True):
        args = ["--listen", address, "--num_servers", str(count), "--num_envs", str(envs)]
        servers = workshop.start("polybeast_env", "--env", "Catch", *args, *of_servers(keys))
        servers.wait_for(f"Serving {envs} Catch environments on {address}")
        said = servers.wait_for(f"polybeast_learner --env_servers {address} --tls_ca ca.pem")
        assert "--token_file token" in said.string
    named = ["--env_servers", ",".join(hosts), *of_learner(keys)]
    learner = workshop.start(
        "polybeast_learner", "--preset", "catch", "--xpid", "a", *named, "--total_steps", "60000"
    )
    learner.wait_for("Found 16 Catch environments on 3 servers")
    learner.wait_for(r"steps ([1-9][\d,]*) of ")
    code, shown = workshop.run("status", hosts[0], *of_learner(keys))
    assert code == 0, shown
    assert re.search(rf"localhost:{first + 1} +Catch +6 +2 of 2 +[\d,]+ +[1-9]", shown), shown
    found = [p for p in psutil.process_iter(["cmdline"]) if str(keys.folder) in str(p.info)]
    assert len(found) >= 6, "programs and servers, by the names of their files"
    assert not [p for p in found if TOKEN in str(p.info["cmdline"])]
    assert learner.end() == 0, learner.said
    rows = list(read_logs(workshop.run_folder("a")))
    assert max(row["mean_episode_return"] for row in rows[len(rows) // 2 :]) > 0.8
    kept = [path for path in workshop.run_folder("a").rglob("*") if path.is_file()]
    secrets = [TOKEN.encode(), *(Path(key).read_bytes()[40:80] for key in (keys.client_key,))]
    assert kept and not [p for p in kept for secret in secrets if secret in p.read_bytes()]
    assert TOKEN not in learner.said


@pytest.mark.long
def test_a_host_may_lose_a_server_and_go_away_and_come_back(workshop: Workshop, keys: Keys) -> None:
    """The learner goes on with the other host, and takes part again when it is back."""
    first = free_ports(3)

    def start(port: int, count: int) -> Program:
        args = ["--listen", f"127.0.0.1:{port}", "--num_servers", str(count), *of_servers(keys)]
        servers = workshop.start("polybeast_env", "--env", MARKED, *args)
        servers.wait_for("Serving")
        return servers

    one, two = start(first, 1), start(first + 1, 2)
    named = ["--env_servers", f"127.0.0.1:{first},127.0.0.1:{first + 1}", *of_learner(keys)]
    small = [*ONE_INCARNATION, "--batch_size", "2", "--unroll_length", "10", "--torch_threads", "1"]
    endless = ["--total_steps", str(10**8), "--xpid", "a"]
    learner = workshop.start("polybeast_learner", *named, *small, *endless)
    learner.wait_for(r"steps ([1-9][\d,]*) of ")
    workshop.servers()[1].kill()
    two.wait_for(rf"server 0 at 127.0.0.1:{first + 1}: .*killed by SIGKILL\. Starting a")
    wait_for(lambda: workshop.streams() == {"live_streams": 3, "lost_streams": 1})
    two.send(signal.SIGINT)
    assert two.end() == 0, two.said
    wait_for(lambda: workshop.streams() == {"live_streams": 1, "lost_streams": 3}, BUSY_S)
    steps = list(read_logs(workshop.run_folder("a")))[-1]["step"]
    wait_for(lambda: list(read_logs(workshop.run_folder("a")))[-1]["step"] > steps + 100)
    again = start(first + 1, 2)
    wait_for(lambda: workshop.streams() == {"live_streams": 3, "lost_streams": 3}, 5 + BUSY_S)
    for program in (learner, one, again):
        program.send(signal.SIGINT)
        assert program.end() == 0, program.said
    workshop.assert_nothing_is_left()


NO_CONNECTION = r"can no longer accept connections.*limit of 200.* Starting a replacement"


def test_a_server_that_strangers_leave_no_connection_is_replaced(workshop: Workshop) -> None:
    """They only connect. gRPC would hear nobody any more, also after they have gone."""
    servers, address = of_few_descriptors(workshop)
    with ExitStack() as strangers:
        with suppress(OSError):  # the server has ended already
            many_connect(address, strangers)
        servers.wait_for(NO_CONNECTION)
    assert_serves_again(servers, address)


@pytest.mark.long
def test_a_server_that_strangers_left_deaf_is_replaced(workshop: Workshop) -> None:
    """They are gone before anybody looks how many connections are open."""
    servers, address = of_few_descriptors(workshop)
    with ExitStack() as strangers:
        many_connect(address, strangers)
    servers.wait_for(NO_CONNECTION)
    assert_serves_again(servers, address)


def of_few_descriptors(workshop: Workshop) -> tuple[Program, tuple[str, int]]:
    """Starts a server that may have 200 files and connections open."""
    few, port = ["bash", "-c", 'ulimit -n 200 && exec "$@"', "bash"], free_ports(1)
    args = ["--num_servers", "1", "--num_envs", "1", "--listen", f"127.0.0.1:{port}"]
    servers = workshop.start("polybeast_env", "--env", "Catch", *args, "--insecure", by=few)
    servers.wait_for("Serving")
    return servers, ("127.0.0.1", port)


def many_connect(address: tuple[str, int], strangers: ExitStack) -> None:
    for _ in range(250):
        strangers.enter_context(socket.create_connection(address))


def assert_serves_again(servers: Program, address: tuple[str, int]) -> None:
    host, port = address
    assert libtorchbeast.describe(f"{host}:{port}", SOON)["env_id"] == "Catch"
    servers.send(signal.SIGINT)
    assert servers.end() == 0, servers.said


@pytest.mark.long
def test_a_slow_host_beside_a_fast_one_holds_nobody_up(workshop: Workshop) -> None:
    """It steps twice a second. A learner that waited for it would learn a hundredth as fast."""
    where = f"127.0.0.1:{free_ports(1)}"

    def host(*by: str) -> Program:
        env = ["--env", "environments:MarkedOfAHost", "--num_servers", "1", "--num_envs", "2"]
        dials = ["--learner", where, "--insecure"]
        return workshop.start("polybeast_env", *env, *dials, by=list(by))

    fast = host()
    small = [*ONE_INCARNATION, "--batch_size", "2", "--unroll_length", "10", "--torch_threads", "1"]
    endless = ["--total_steps", str(10**8), "--xpid", "a", "--connect_timeout", "100"]
    learner = workshop.start("polybeast_learner", "--listen", where, "--insecure", *small, *endless)
    learner.wait_for(r"steps ([1-9][\d,]*) of ")
    before = steps_per_second(workshop, learner)
    slow = host("env", "STEP_S=0.5")
    wait_for(lambda: workshop.streams()["live_streams"] == 4)
    beside = steps_per_second(workshop, learner)
    assert workshop.streams() == {"live_streams": 4, "lost_streams": 0}
    slow.send(signal.SIGINT)
    assert slow.end() == 0, slow.said
    wait_for(lambda: workshop.streams()["live_streams"] == 2)
    after = steps_per_second(workshop, learner)
    # A third, because other programs of the machine come and go.
    assert beside > min(before, after) / 3, f"{before:.0f}, {beside:.0f}, {after:.0f} steps/s"
    for program in (learner, fast):
        program.send(signal.SIGINT)
        assert program.end() == 0, program.said
    workshop.assert_nothing_is_left()


def steps_per_second(workshop: Workshop, learner: Program) -> float:
    """Waits until 3000 steps more have been learnt; returns the rate."""

    def now() -> tuple[float, float]:
        rows = list(read_logs(workshop.run_folder("a")))
        return next((row["step"], row["_time"]) for row in reversed(rows) if "live_streams" in row)

    (step, since), shown = now(), 0
    while shown < step + 3000:
        shown = int(learner.wait_for(r"steps ([\d,]+) of ")[1].replace(",", ""))
    later, until = now()
    return (later - step) / (until - since)


@pytest.mark.parametrize(
    ("flag", "sentence"),
    [
        ("--tls_cert", "--tls_cert /none cannot be read (No such file or directory)"),
        ("--tls_key", "--tls_key /none cannot be read"),
        ("--tls_client_ca", "--tls_client_ca /none cannot be read"),
        ("--token_file", "--token_file /none cannot be read"),
    ],
)
def test_servers_with_unusable_files_end_at_once(
    keys: Keys, capsys: pytest.CaptureFixture[str], flag: str, sentence: str
) -> None:
    args = of_servers(keys)
    args[args.index(flag) + 1] = "/none"
    listen = ["--listen", f"127.0.0.1:{free_ports(1)}", "--num_servers", "1"]
    assert polybeast_env.main(["--env", "Catch", *listen, *args]) == 2
    assert sentence in capsys.readouterr().err


def test_a_port_in_use_ends_the_servers_at_once(
    keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    first = free_ports(2)
    with socket.create_server(("127.0.0.1", first + 1)):
        args = ["--listen", f"127.0.0.1:{first}", "--num_servers", "2", *of_servers(keys)]
        assert polybeast_env.main(["--env", "Catch", *args]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen at 127.0.0.1:{first + 1} (Address already in use)" in said


@needs_ipv6
def test_a_port_in_use_in_ipv6_alone_ends_the_servers(
    keys: Keys, capsys: pytest.CaptureFixture[str]
) -> None:
    """gRPC would be content with IPv4."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        address = f"0.0.0.0:{taken.getsockname()[1]}"
        args = ["--listen", address, "--num_servers", "1", "--num_envs", "1", *of_servers(keys)]
        assert polybeast_env.main(["--env", "Catch", *args]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen at {address} (Address already in use)" in said


# A network of its own, whose interface is down: it has no address, so neither 127.0.0.1 nor ::1.
NO_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run([*NO_NETWORK, "true"], capture_output=True).returncode != 0,
    reason="this user can make no network namespace",
)
@pytest.mark.parametrize("host", [later("0.0.0.0"), "[::]"])
def test_a_machine_without_ipv6_serves_at_all_its_addresses(workshop: Workshop, host: str) -> None:
    where = ["--listen", f"{host}:50051", "--insecure"]
    small = ["--env", "Catch", "--num_servers", "1", "--num_envs", "1"]
    servers = workshop.start("polybeast_env", *small, *where, by=NO_NETWORK)
    servers.wait_for("Serving")
    servers.send(signal.SIGTERM)
    assert servers.end() == 0, servers.said


def test_a_learner_with_unusable_files_or_hosts_ends_at_once(
    keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: str, code: int = 2) -> str:
        where = ["--savedir", str(tmp_path), "--xpid", "a", "--connect_timeout", "100"]
        assert polybeast_learner.main([*args, *where]) == code
        return capsys.readouterr().err

    assert "--tls_ca /none cannot be read" in fails("--env_servers", "a:1", "--tls_ca", "/none")
    assert "no-such-host.invalid is unknown on this machine" in fails(
        "--env_servers", "no-such-host.invalid:1", *of_learner(keys), code=1
    ), "a container that is not up has no name"
    assert "expected HOST:PORT with a port" in fails("--env_servers", "/none", "--insecure")


def test_the_status_of_an_absent_server_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_ports(1)}"
    assert status.main([address, "--insecure", "--timeout", "0.1"]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"no environment server answers at {address} (waited 0.1 s): start")
    assert status.main([address]) == 2
    assert "--insecure if the network is already protected" in capsys.readouterr().err


def test_nothing_but_our_sentence_is_said_of_a_port_without_tls(
    workshop: Workshop, keys: Keys
) -> None:
    """gRPC would print three lines of its own about it."""
    address = f"127.0.0.1:{free_ports(1)}"
    with serving(lambda: make("Catch", 1), address):
        code, said = workshop.run("status", address, "--tls_ca", keys.ca, "--timeout", "2")
    assert code == 1
    assert said.startswith(f"{address}: this port does not use TLS: start the listening side")
    assert said.count("\n") == 1


def test_the_status_of_several_hosts_has_all_in_the_order_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = free_ports(4)
    a, b, c, d = (f"127.0.0.1:{first + i}" for i in range(4))
    asked = ["--insecure", "--timeout", "0.1"]
    for words in ([b, f"{a},{d}", *asked], [*asked, f"{c},{d}", a]):
        assert status.main(words) == 1
        said = re.findall(r"no environment server answers at (\S+)", capsys.readouterr().out)
        assert said == ([b, a, d] if words[0] == b else [c, d, a])
    assert status.main(["unix:/tmp/none", a, *asked]) == 2
    assert "unix:/tmp/none" in capsys.readouterr().err


def test_the_status_of_the_servers_of_this_user_needs_no_flag(workshop: Workshop) -> None:
    servers = workshop.start("polybeast_env", "--env", "Catch", "--num_servers", "2")
    servers.wait_for("Serving 2 ")
    code, said = workshop.run("status")
    assert code == 0 and said.count(" Catch ") == 2, said
    servers.send(signal.SIGINT)
    assert servers.end() == 0, servers.said
