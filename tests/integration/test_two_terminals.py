# SPDX-License-Identifier: Apache-2.0
"""Servers in one terminal, the learner in another."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from background import wait_for
from ports import free_port
from programs import LEARNING, Workshop
from scraping import scraped

from torchbeast.reporting.log_files import read_logs

SMALL = [
    "--batch_size",
    "2",
    "--unroll_length",
    "10",
    "--torch_threads",
    "1",
    "--total_steps",
    "400",
    "--xpid",
    "a",
]


def test_the_learner_finds_the_servers_of_the_same_user_and_logs_the_numbers_that_they_send(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--env", "environments:Telling", "--info_keywords", "length", "squared"]
    servers = workshop.start("polybeast_env", *words, "--num_servers", "3")
    servers.wait_for("Serving 3 environments:Telling environments")
    assert workshop.call("polybeast_learner", *SMALL) == 0
    said = capsys.readouterr().out
    assert "Found 3 environments:Telling environments on 3 servers." in said
    recorded = workshop.meta("a")["args"]
    assert recorded["env"] == "environments:Telling"
    assert recorded["info_keywords"] == ["length", "squared"]
    assert recorded["reward_clipping"] == "none", "decided by what the servers say they serve"
    _check_numbers(workshop.run_folder("a"))
    servers.send(signal.SIGINT)
    assert servers.end() == 0, servers.said
    workshop.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
def test_one_program_logs_them_too(workshop: Workshop, program: str) -> None:
    words = ["--env", "environments:Telling", "--info_keywords", "length", "squared"]
    code, said = workshop.run(program, *words, *SMALL, "--num_envs", "2")
    assert code == 0, said
    _check_numbers(workshop.run_folder("a"))
    workshop.assert_nothing_is_left()


def _check_numbers(folder: Path) -> None:
    """Checks that they are means over the same games as return and length."""
    rows = [row for row in read_logs(folder) if "mean_episode_length" in row]
    assert len(rows) > 5
    for row in rows:
        assert row["info_length"] == pytest.approx(row["mean_episode_length"])
        # The return of an episode of n steps is 1 + ... + n = (n^2 + n) / 2.
        twice = row["info_squared"] + row["info_length"]
        assert row["mean_episode_return"] == pytest.approx(twice / 2)


@pytest.mark.long
def test_servers_and_learner_use_the_given_basename(workshop: Workshop) -> None:
    basename = f"unix:{workshop.runtime_folder}/mine"
    servers = workshop.start(
        "polybeast_env", "--env", "Catch", "--num_servers", "1", "--pipes_basename", basename
    )
    servers.wait_for("Serving 1 ")
    servers.wait_for(rf"polybeast_learner --pipes_basename {basename}$")
    assert [path.name for path in workshop.sockets()] == ["mine.0"]
    args = [*SMALL, "--num_envs", "1", "--pipes_basename", basename, "--env", "Catch"]
    code, said = workshop.run("polybeast_learner", *args)
    assert code == 0, said


@pytest.mark.long
def test_more_environments_than_num_envs_are_refused_with_a_message(workshop: Workshop) -> None:
    servers = workshop.start(
        "polybeast_env", "--env", "Catch", "--num_servers", "1", "--num_envs", "6"
    )
    servers.wait_for("Serving 6 ")
    code, said = workshop.run("polybeast_learner", *SMALL, "--num_envs", "4")
    assert code == 2, said
    assert "serve 6 environments, but --num_envs is 4: use --num_envs 6, or" in said, said


@pytest.mark.long
def test_fewer_environments_than_num_envs_are_refused_with_a_message(workshop: Workshop) -> None:
    servers = workshop.start("polybeast_env", "--env", "Catch", "--num_servers", "2")
    servers.wait_for("Serving 2 ")
    args = [*SMALL, "--num_envs", "4", "--connect_timeout", "2"]
    code, said = workshop.run("polybeast_learner", *args)
    assert code == 2, said
    assert "serve 2 environments, but --num_envs is 4: use --num_envs 2, or" in said, said
    assert "Traceback" not in said, said


@pytest.mark.long
def test_a_learner_waits_for_servers_that_start_later(workshop: Workshop) -> None:
    """The learner is started first, and asks before all of them serve."""
    learner = workshop.start("polybeast_learner", *SMALL, "--connect_timeout", "60")
    servers = workshop.start(
        "polybeast_env", "--env", "Catch", "--num_servers", "10", "--num_envs", "20"
    )
    learner.wait_for("Found 20 Catch environments on 10 servers.")
    assert learner.end() == 0, learner.said
    servers.send(signal.SIGINT)
    assert servers.end() == 0, servers.said


@pytest.mark.long
def test_servers_of_another_environment_are_refused_with_a_message(workshop: Workshop) -> None:
    servers = workshop.start("polybeast_env", "--env", "Catch", "--num_servers", "1")
    servers.wait_for("Serving")
    args = [*SMALL, "--num_envs", "1", "--env", "Memory"]
    code, said = workshop.run("polybeast_learner", *args)
    assert code == 2 and "the servers serve Catch, but --env (or the preset's) is Memory" in said, (
        said
    )


def test_absent_servers_are_reported_with_a_message(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workshop.call("polybeast_learner", *SMALL, "--connect_timeout", "1") == 1
    said = capsys.readouterr().err
    assert "no environment server answers at unix:" in said and "Traceback" not in said, said
    assert "--env_servers, --listen" in said, said


@pytest.mark.long
def test_an_address_in_use_is_refused_and_its_server_continues(workshop: Workshop) -> None:
    first = workshop.start("polybeast_env", "--env", "Catch", "--num_servers", "1")
    first.wait_for("Serving")
    code, said = workshop.run("polybeast_env", "--env", "Catch", "--num_servers", "1")
    assert code == 1, said
    assert "polybeast.0" in said and "Traceback" not in said, said
    code, said = workshop.run("polybeast_learner", *SMALL, "--num_envs", "1")
    assert code == 0, said


@pytest.mark.long
def test_a_server_that_dies_is_replaced_and_the_learner_continues(workshop: Workshop) -> None:
    """The servers' metrics show it, too."""
    pytest.importorskip("prometheus_client")
    port = free_port()
    where = ["--num_servers", "3", "--metrics_port", str(port)]
    servers = workshop.start("polybeast_env", "--env", "Catch", *where)
    servers.wait_for("Serving")
    wait_for(lambda: served(port, "open_streams") == [0, 0, 0])
    args = [*SMALL, "--num_envs", "3", "--total_steps", str(10**8)]
    learner = workshop.start("polybeast_learner", *args)
    learner.wait_for(LEARNING)
    wait_for(lambda: served(port, "open_streams") == [1, 1, 1])
    wait_for(lambda: min(served(port, "served_env_steps_total")) > 100)
    first, second, third = workshop.servers()
    second.kill()
    servers.wait_for(
        r"Warning: environment server 1 at unix:.*\.1: process \d+ was killed by SIGKILL\. "
        "Starting a replacement"
    )
    wait_for(lambda: workshop.streams() == {"live_streams": 3, "lost_streams": 1})
    wait_for(lambda: served(port, "replaced_servers_total") == [1])
    wait_for(lambda: served(port, "open_streams") == [1, 1, 1])
    found = workshop.servers()
    assert len(found) == 3 and first in found and third in found
    servers.send(signal.SIGINT)
    assert servers.end() == 0, servers.said
    learner.wait_for(r"streams 0 of 3, 3 lost, the first one \d+ s ago")
    learner.wait_for(r"^Lost all 3 streams \(the first one \d+ s ago\): unix:.*; reconnecting")
    learner.send(signal.SIGINT)
    assert learner.end() == 0, learner.said
    assert "num_servers" not in learner.said.partition("Lost all 3 streams")[2]
    workshop.assert_nothing_is_left()


def served(port: int, name: str) -> list[float]:
    """Returns the samples of a metric, one for each server."""
    found = sorted(scraped(port).items())
    return [value for (metric, *_), value in found if metric == f"torchbeast_{name}"]


@pytest.mark.long
def test_a_server_that_dies_repeatedly_ends_its_program(workshop: Workshop) -> None:
    servers = workshop.start("polybeast_env", "--env", "Catch", "--num_servers", "2")
    servers.wait_for("Serving")
    for _ in range(4):
        first, second = workshop.servers()
        first.kill()
        servers.wait_for("Starting a replacement")
        wait_for(lambda old={first, second}: len({*workshop.servers()} - old) == 1)
    workshop.servers()[0].kill()
    assert servers.end() == 1
    assert "environment server 0 at unix:" in servers.said and "SIGKILL" in servers.said
    assert "5 processes died in its place within" in servers.said
    assert "Traceback" not in servers.said
    workshop.assert_nothing_is_left()
