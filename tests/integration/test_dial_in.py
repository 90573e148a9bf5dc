# SPDX-License-Identifier: Apache-2.0
"""Hosts that dial in to the learner, by whole programs over TLS with a token."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from background import wait_for
from keys_of_tests import TOKEN, Keys
from ports import free_port
from programs import BUSY_S, MARKED, ONE_INCARNATION, Program, Workshop

from torchbeast import polybeast_env, polybeast_learner
from torchbeast.reporting.log_files import read_logs


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def port() -> int:
    return free_port()


def host(
    workshop: Workshop, keys: Keys, port: int, servers: int, envs: int, env: str = MARKED
) -> Program:
    """Starts environment servers that dial the learner."""
    count = ["--num_servers", str(servers), "--num_envs", str(envs)]
    files = ["--tls_ca", keys.ca, "--tls_cert", keys.client_cert, "--tls_key", keys.client_key]
    where = ["--learner", f"localhost:{port}", "--token_file", keys.token]
    return workshop.start("polybeast_env", "--env", env, *count, *where, *files)


def of_door(keys: Keys, port: int) -> list[str]:
    """Returns the flags of a learner to which hosts dial in."""
    pair = ["--tls_cert", keys.cert, "--tls_key", keys.key]
    listen = ["--listen", f"127.0.0.1:{port}", "--connect_timeout", "100"]
    return [*listen, *pair, "--tls_client_ca", keys.ca, "--token_file", keys.token]


SMALL = ["--batch_size", "2", "--unroll_length", "10", "--torch_threads", "1"]
CHECKED = [*SMALL, *ONE_INCARNATION]


@pytest.mark.long
def test_catch_is_learnt_from_hosts_that_dial_in_and_end_with_the_run(
    workshop: Workshop, keys: Keys, port: int
) -> None:
    """The hosts are there first."""
    hosts = [host(workshop, keys, port, 2, 12, "Catch"), host(workshop, keys, port, 1, 4, "Catch")]
    for one, envs in zip(hosts, (12, 4), strict=True):
        one.wait_for(f"Serving {envs} Catch environments to the learner at localhost:{port}")
    learner = workshop.start(
        *("polybeast_learner", "--preset", "catch", "--xpid", "a", *of_door(keys, port)),
        *("--num_envs", "16", "--total_steps", "60000"),
    )
    learner.wait_for("Found 16 Catch environments on 1 host")
    assert learner.end() == 0, learner.said
    rows = list(read_logs(workshop.run_folder("a")))
    assert max(row["mean_episode_return"] for row in rows[len(rows) // 2 :]) > 0.8
    kept = [path for path in workshop.run_folder("a").rglob("*") if path.is_file()]
    assert kept and not [path for path in kept if TOKEN.encode() in path.read_bytes()]
    for one in hosts:
        assert one.end() == 0, one.said
        assert TOKEN not in one.said
    workshop.assert_nothing_is_left()


def test_hosts_join_and_leave_a_run_and_wait_for_a_learner_that_was_killed(
    workshop: Workshop, keys: Keys, port: int
) -> None:
    kept = host(workshop, keys, port, 1, 2)
    command = ["polybeast_learner", *of_door(keys, port), *CHECKED]
    endless = ["--total_steps", str(10**8), "--xpid", "a", "--checkpoint_interval", "1"]
    learner = workshop.start(*command, *endless)
    learner.wait_for(f"Found 2 {MARKED} environments on 1 host\\.")
    learner.wait_for(r"steps ([1-9][\d,]*) of ")
    killed = host(workshop, keys, port, 2, 4)
    killed.wait_for("Connected to the learner")
    wait_for(lambda: streams(workshop) == {"live_streams": 6, "lost_streams": 0})
    other = host(workshop, keys, port, 1, 2, "Catch")
    other.wait_for("does not use this host's environments: .* must have the same")
    other.send(signal.SIGINT)
    killed.kill()
    wait_for(lambda: streams(workshop) == {"live_streams": 2, "lost_streams": 4}, BUSY_S)
    wait_for((workshop.run_folder("a") / "model.tar").exists)
    learner.kill()
    kept.wait_for("reconnecting", BUSY_S)
    resumed = workshop.start(*command, *endless)
    resumed.wait_for("Found [12] .* environments? on", 15 + BUSY_S)  # each stream dials on its own
    resumed.wait_for(r"steps ([1-9][\d,]*) of ")
    wait_for(lambda: streams(workshop) == {"live_streams": 2, "lost_streams": 0}, BUSY_S)
    for program in (resumed, kept):
        program.send(signal.SIGINT)
        assert program.end() == 0, program.said
    assert other.end() == 0, other.said
    workshop.assert_nothing_is_left()


def streams(workshop: Workshop) -> dict[str, float]:
    """Returns the numbers of streams in the learner's last row, which may be half written."""
    row = list(read_logs(workshop.run_folder("a")))[-1]
    return {name: row.get(name, -1) for name in ("live_streams", "lost_streams")}


@pytest.mark.long
def test_a_signal_to_every_process_of_a_learner_and_its_host_stops_both_in_order(
    workshop: Workshop, keys: Keys, port: int
) -> None:
    """The programs themselves are the last ones to get it."""
    serving = host(workshop, keys, port, 1, 2)
    learner = workshop.start("polybeast_learner", *of_door(keys, port), *SMALL, "--xpid", "a")
    learner.wait_for(r"steps ([1-9][\d,]*) of ")
    programs = {serving.pid, learner.pid}
    processes = workshop.processes()
    assert len(processes) == 3
    for process in sorted(processes, key=lambda process: process.pid in programs):
        process.send_signal(signal.SIGTERM)
    for program in (learner, serving):
        assert program.end() == 0, program.said
    assert workshop.meta("a")["successful"] is True
    assert "killed by" not in (workshop.run_folder("a") / "out.log").read_text()
    assert (workshop.run_folder("a") / "model.tar").exists()
    workshop.assert_nothing_is_left()


def test_a_learner_to_which_no_host_dials_in_ends_with_a_sentence(
    keys: Keys, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--savedir", str(tmp_path / "runs"), "--xpid", "a"]
    assert polybeast_learner.main([*of_door(keys, port), *where, "--connect_timeout", "0.2"]) == 1
    said = capsys.readouterr()
    assert f"Waiting for hosts at 127.0.0.1:{port}" in said.out
    assert f"no host dialled in at 127.0.0.1:{port} within 0.2 s: start python -m" in said.err


def test_a_learner_that_cannot_listen_or_has_unusable_files_ends_at_once(
    keys: Keys, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--savedir", str(tmp_path / "runs"), "--xpid", "a"]
    with socket.create_server(("127.0.0.1", port)):
        assert polybeast_learner.main([*of_door(keys, port), *where]) == 2
    assert f"cannot listen at 127.0.0.1:{port} (Address already in use)" in capsys.readouterr().err
    args = of_door(keys, port)
    args[args.index("--token_file") + 1] = "/none"
    assert polybeast_learner.main([*args, *where]) == 2
    assert "--token_file /none cannot be read" in capsys.readouterr().err


def test_a_host_with_unusable_files_ends_before_it_makes_an_environment(
    keys: Keys, port: int, runtime_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--learner", f"localhost:{port}", "--tls_ca", "/none", "--token_file", keys.token]
    assert polybeast_env.main(["--env", "Catch", *args]) == 2
    assert "--tls_ca /none cannot be read" in capsys.readouterr().err
    assert list(runtime_folder.iterdir()) == []


@pytest.mark.long
def test_a_host_with_another_token_says_so_and_dials_again(
    workshop: Workshop, keys: Keys, port: int, tmp_path: Path
) -> None:
    other = Keys(tmp_path / "other")
    Path(other.token).write_text("another-token-of-this-test")
    learner = workshop.start("polybeast_learner", *of_door(keys, port), "--xpid", "a")
    learner.wait_for("Waiting for hosts")
    keys.token = other.token
    refused = host(workshop, keys, port, 1, 1)
    refused.wait_for(f"learner at localhost:{port}: this is not its token.*reconnecting")
    for program in (learner, refused):
        program.send(signal.SIGINT)
        assert program.end() == 0, program.said
    workshop.assert_nothing_is_left()
