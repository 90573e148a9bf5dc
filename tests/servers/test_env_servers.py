# SPDX-License-Identifier: Apache-2.0
"""A dead server is replaced unless it dies repeatedly or the run has ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from background import Background, wait_for

from torchbeast import polybeast
from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.envs import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets import supervisor as supervision
from torchbeast.fleets import waiting
from torchbeast.fleets.child_process import ProcessDied
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.servers import env_servers
from torchbeast.servers.env_servers import EnvServers, ServerPlan

PLAN = ServerPlan(num_streams=1, envs_per_stream=2)
KILLED = ProcessDied("process 1 was killed by SIGKILL")


class Process:
    """A fake process; the test decides when it serves and when it dies."""

    started: list[Process]

    def __init__(
        self, name: str, module: str, arguments: Any, on_report: Any, on_end: Any, environment: Any
    ) -> None:
        self.pid, self.environment = len(self.started), environment
        self.address, self._on_report, self.dies = arguments["address"], on_report, on_end
        self.ended = False
        self.given_up: list[str] = []
        self.started.append(self)

    def serves(self) -> None:
        self._on_report({"ready": True})

    def give_up(self, why: str) -> None:
        self.given_up.append(why)

    def ask_to_end(self) -> None:
        self.ended = True

    def end_by(self, deadline: float) -> None:
        assert self.ended


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """All fake processes, in the order of their starts."""
    Process.started = []
    monkeypatch.setattr(env_servers, "ChildProcess", Process)
    return Process.started


def two_servers(folder: Path) -> tuple[EnvServers, Supervisor]:
    supervisor = Supervisor()
    addresses = [f"unix:{folder}/a.{i}" for i in range(2)]
    return EnvServers(supervisor, EnvSpec("Catch"), [PLAN, PLAN], addresses), supervisor


def test_servers_share_the_cores(
    started: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(env_servers, "available_cores", lambda: 6)
    two_servers(tmp_path)
    assert [each.environment["OMP_NUM_THREADS"] for each in started] == ["3", "3"]


def test_where_one_cannot_be_started_the_others_end(
    started: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*args: Any, **kwargs: Any) -> Process:
        if started:
            raise OSError("Argument list too long")
        return Process(*args, **kwargs)

    monkeypatch.setattr(env_servers, "ChildProcess", start)
    with pytest.raises(OSError, match="too long"):
        EnvServers(Supervisor(), EnvSpec("Catch"), [PLAN, PLAN], ["unix:a.0", "unix:a.1"])
    assert [process.ended for process in started] == [True]


def test_a_run_whose_sockets_have_too_long_names_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    flags = parse(PolyBeastFlags, "polybeast", ["--env", "Catch"])
    with pytest.raises(UsageError, match="more than the 107 of a Unix socket"):
        with polybeast.environment_servers(flags, Supervisor()):
            pass
    assert list(folder.iterdir()) == []


def test_a_dead_server_is_replaced_at_its_own_address(
    started: list[Process], tmp_path: Path
) -> None:
    servers, supervisor = two_servers(tmp_path)
    started[0].serves()
    started[1].dies(KILLED)
    assert [process.address for process in started[1:]] == [f"unix:{tmp_path}/a.1"] * 2
    assert servers.pids == [0, 2] and not supervisor.ended
    started[2].serves()
    assert servers.wait_ready()


def test_servers_that_are_slow_to_start_are_named_and_waited_for(
    started: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "_LOOK_S", 0.01)
    monkeypatch.setattr(waiting, "WAIT_S", 0.0)
    monkeypatch.setattr(waiting, "STALL_S", 0.0)
    said: list[str] = []
    monkeypatch.setattr(waiting, "warn", lambda sentence, *_: said.append(sentence))
    servers, _ = two_servers(tmp_path)
    started[0].serves()
    ready = Background(servers.wait_ready)
    wait_for(lambda: len(said) >= 2)
    assert all("waiting for environment server 1 of 2, or" in each for each in said)
    started[1].serves()
    assert ready.result()


def test_a_server_that_does_not_serve_within_ten_minutes_is_given_up(
    started: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that serve, or have ended, are not, and one that takes the place of another is."""
    monkeypatch.setattr(env_servers, "_START_S", 0.05)
    servers, _ = two_servers(tmp_path)
    started[0].serves()
    wait_for(lambda: started[1].given_up)
    assert started[1].given_up == ["did not serve within 0 minutes, and was killed"]
    started[1].serves()
    started[0].dies(KILLED)
    wait_for(lambda: len(started) == 3 and started[2].given_up)
    assert not started[0].given_up and len(started[1].given_up) == 1
    servers.close()


def test_the_end_of_the_run_ends_the_wait_for_a_slow_server(
    started: list[Process], tmp_path: Path
) -> None:
    servers, supervisor = two_servers(tmp_path)
    ready = Background(servers.wait_ready)
    supervisor.stop("SIGINT")
    assert ready.result() is False


def test_a_server_that_reports_an_error_fails_the_run(
    started: list[Process], tmp_path: Path
) -> None:
    _, supervisor = two_servers(tmp_path)
    started[0].serves()
    started[0].dies(RunError("the cartridge cannot be read"))
    assert len(started) == 2 and "cartridge" in str(supervisor.failure)


@pytest.mark.parametrize("how", ["closed", "stopped"])
def test_no_server_is_replaced_after_the_end(
    started: list[Process], tmp_path: Path, how: str
) -> None:
    servers, supervisor = two_servers(tmp_path)
    started[0].serves()
    servers.close() if how == "closed" else supervisor.stop("done")
    started[1].dies(KILLED)
    assert len(started) == 2 and supervisor.failure is None


def test_the_socket_of_a_killed_server_is_removed_but_not_that_of_another_program(
    started: list[Process], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "_PAUSE_S", 0.0)
    servers, _ = two_servers(tmp_path)
    for process in started[:]:
        process.serves()
        Path(process.address.removeprefix("unix:")).touch()
    started[0].dies(KILLED)  # its successor never serves
    started[1].dies(KILLED)
    started[3].dies(RunError("another process serves it"))
    servers.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.1"]
