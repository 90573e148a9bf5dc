# SPDX-License-Identifier: Apache-2.0
"""Tests of a RayFleet whose connection to Ray is lost. Ray is an imitation here."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.fleet import WorkerLocation, WorkerLost
from torchbeast.on_ray.config import RayConfig
from torchbeast.on_ray.connection import ENDED, RESUME
from torchbeast.on_ray.fleet import RayFleet, User, _result

GONE = ConnectionError("the Ray client has already been disconnected")
LOST = (
    f"the connection to Ray was lost ({GONE}): any checkpoint of the run is kept, and resumes "
    "it once the cluster can be reached"
)
SAID = ENDED.format("raybeast", RESUME)
MODULES = ("ray", "ray.exceptions", "ray.util", "ray.util.client", "ray.util.placement_group")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    imitation = MagicMock(spec=ModuleType("ray"))
    for name in (
        "get_runtime_context",
        "init",
        "kill",
        "method",
        "nodes",
        "put",
        "remote",
        "shutdown",
        "util",
        "_private",
    ):
        setattr(imitation, name, MagicMock())
    imitation.is_initialized = MagicMock(return_value=False)
    imitation.__version__ = "2"
    imitation.is_initialized = MagicMock(return_value=False)
    for name in ("ObjectStoreFullError", "OutOfDiskError"):
        setattr(imitation, name, type(name, (Exception,), {}))
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, imitation)
    imitation.ray = MagicMock()  # ray.util.client's: the connection from outside a cluster
    imitation.placement_group = MagicMock()
    imitation.remove_placement_group = MagicMock()
    return imitation


@pytest.mark.parametrize("what", ["kill", "remove_placement_group", "shutdown"])
def test_an_end_without_connection_goes_on_and_hides_no_failure(ray: Any, what: str) -> None:
    getattr(ray, what).side_effect = GONE
    with pytest.raises(RunError, match="the first failure"):
        with RayFleet(RayConfig(address="auto", learner_cpus=1), "run") as fleet:
            fleet.reserve_for_learner()
            for name in ("one", "another"):
                fleet.worker(name)
            raise RunError("the first failure")
    assert ray.kill.call_count == 2
    ray.remove_placement_group.assert_called_once()
    ray.shutdown.assert_called_once()


def test_a_start_of_ray_delays_no_signal_of_a_program(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda *_: seen.append(1))

    def interrupted(**_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        assert seen == [1]

    ray.init.side_effect = interrupted
    try:
        with RayFleet(RayConfig(address="auto"), "run"):
            pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [1]


@pytest.mark.parametrize("is_client", [False, True])
def test_a_connection_that_the_process_has_is_used_and_left_as_it_was(
    ray: Any, is_client: bool
) -> None:
    ray.is_initialized.return_value = True
    ray.ray.is_connected.return_value = is_client
    ray.get_runtime_context().gcs_address = "10.0.0.1:6379"
    with RayFleet(RayConfig(), "run") as fleet:
        fleet.worker("one")
        assert fleet._address == ("ray://" if is_client else "10.0.0.1:6379")
        assert (fleet.own_node == "") == is_client
    ray.init.assert_not_called()
    ray.shutdown.assert_not_called()
    ray.kill.assert_called_once()


@pytest.mark.parametrize(
    "asked",
    [
        {"config": RayConfig(address="auto")},
        {"config": RayConfig(), "user": User("sweep", "", {"A": "1"})},
    ],
)
def test_a_connection_that_the_process_has_is_refused_where_another_is_asked_for(
    ray: Any, asked: Any
) -> None:
    ray.is_initialized.return_value = True
    with pytest.raises(UsageError, match=r"initialised .* already: call ray.shutdown\(\) first"):
        RayFleet(**asked, run="run")
    ray.init.assert_not_called()
    ray.shutdown.assert_not_called()


def test_a_connection_that_another_run_has_made_and_will_end_is_not_used(ray: Any) -> None:
    with RayFleet(RayConfig(address="auto"), "first"):
        ray.is_initialized.return_value = True
        with pytest.raises(UsageError, match="started in this process for another run"):
            RayFleet(RayConfig(), "second")
        ray.shutdown.assert_not_called()
    RayFleet(RayConfig(), "third").end()
    ray.shutdown.assert_called_once()


def test_actors_outside_a_cluster_cannot_reach_the_program(ray: Any) -> None:
    ray.is_initialized.return_value = True
    ray.ray.is_connected.return_value = True
    with RayFleet(RayConfig(), "run") as fleet:
        with pytest.raises(UsageError, match="actors cannot reach a program .* ray://"):
            _ = fleet.host


@pytest.mark.parametrize(
    ("address", "said_in", "instead"),
    [(None, "$RAY_ADDRESS", "unset RAY_ADDRESS"), ("127.0.0.1:9", "--address", "remove --addr")],
)
def test_an_address_without_a_cluster_is_told_where_it_was_given(
    ray: Any, monkeypatch: pytest.MonkeyPatch, address: str | None, said_in: str, instead: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(RunError) as error:
        RayFleet(RayConfig(address=address), "run")
    assert f"no Ray cluster at {said_in} 127.0.0.1:9" in str(error.value)
    assert instead in str(error.value)


def test_others_join_the_cluster_where_its_head_is(ray: Any) -> None:
    ray.get_runtime_context().gcs_address = "10.0.0.1:6379"
    with RayFleet(RayConfig(address="auto"), "run") as fleet:
        assert fleet.cluster == "10.0.0.1:6379"


def test_variables_of_a_program_reach_its_processes_on_all_nodes(ray: Any) -> None:
    for address in (None, "auto"):
        with RayFleet(RayConfig(address=address), "run", user=User("sweep", "", {"A": "1"})):
            assert ray.init.call_args.kwargs["runtime_env"]["env_vars"] == {"A": "1"}
        with RayFleet(RayConfig(address=address), "run"):
            assert "env_vars" not in (ray.init.call_args.kwargs["runtime_env"] or {})


def test_a_call_without_connection_is_answered_with_the_runs_failure(ray: Any) -> None:
    answers: list[Any] = []
    with RayFleet(RayConfig(address="auto"), "run") as fleet:
        worker: Any = fleet.worker("one")
        worker._handle.end.remote.side_effect = GONE
        worker.call(answers.append, "end")
    (answer,) = answers
    assert isinstance(answer, RunError) and str(answer) == LOST


@pytest.mark.parametrize(
    ("needs", "ask"),
    [
        ("put", lambda fleet: fleet.put(b"weights")),
        (
            "nodes",
            lambda fleet: fleet.explain(WorkerLost("it died"), WorkerLocation("10.0.0.2", 7, "b")),
        ),
        ("nodes", lambda fleet: fleet.room()),
        ("remote", lambda fleet: fleet.worker("one")),
    ],
)
def test_whatever_needs_the_connection_says_that_it_is_lost_and_how_to_go_on(
    ray: Any, needs: str, ask: Callable[[RayFleet], Any]
) -> None:
    with RayFleet(RayConfig(address="auto"), "run") as fleet:
        # The class of actors, which ray.remote has returned, makes an actor by its own remote().
        cut = ray.remote()().options() if needs == "remote" else ray
        getattr(cut, needs).side_effect = GONE
        with pytest.raises(RunError) as error:
            ask(fleet)
    assert str(error.value) == LOST


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("os._exit(1)", 1, f"{SAID}\n"),  # as Ray does when its raylet has died
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, f"{SAID}\n"),
        ("pass", 0, ""),
        ("sys.exit(3)", 3, ""),
    ],
)
def test_a_program_that_is_ended_by_force_still_says_how_to_go_on(
    end: str, code: int, said: str
) -> None:
    program = f"""
import os, signal, sys
from torchbeast.on_ray.connection import last_words
with last_words("raybeast"):
    {end}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (code, said)


def test_a_call_without_connection_starts_no_other_ray() -> None:
    """As Ray does by default: the end of a run that had lost its cluster took half a minute, and
    left a token in the home folder, which every later cluster demanded.
    """
    program = """
from torchbeast.errors import RunError
from torchbeast.on_ray.config import RayConfig
from torchbeast.on_ray.fleet import RayFleet
try:
    RayFleet(RayConfig(address="localhost:1"), "run")
except RunError as error:
    print("there is no Ray cluster" in str(error))
import ray
try:
    ray.put(1)
except Exception:
    print(ray.is_initialized())
"""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    environment.pop("RAY_ENABLE_AUTO_CONNECT", None)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ended.stdout.split() == ["True", "False"], ended.stderr


def test_a_folder_that_ray_does_not_take_is_told_with_the_reason(ray: Any) -> None:
    class RuntimeEnvSetupError(Exception):
        error_message = "Failed to upload working_dir /me to the Ray cluster: it is too large."

        def __str__(self) -> str:
            return f"Failed to set up runtime environment.\n{self.error_message}"

    ray.init.side_effect = RuntimeEnvSetupError()
    with pytest.raises(RunError, match="cannot be used: Failed to upload .* it is too large$"):
        RayFleet(RayConfig(address="auto"), "run", own_code=True)


def test_an_interrupt_while_ray_starts_leaves_none(ray: Any) -> None:
    ray.init.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        RayFleet(RayConfig(address="auto"), "run")
    ray.shutdown.assert_called_once()


def test_an_interrupt_of_the_end_leaves_no_actor_and_no_ray(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = RayFleet(RayConfig(address="auto"), "run")
    fleet.worker("one")
    with monkeypatch.context() as patch:
        patch.setattr(RayFleet, "_let_end", MagicMock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            fleet.end()
    ray.kill.assert_called_once()
    ray.shutdown.assert_called_once()


def test_a_fleet_ends_in_order_after_ray_was_shut_down(ray: Any) -> None:
    """A program that has not closed its Learner exits like this: Ray's own exit comes first."""
    fleet = RayFleet(RayConfig(address="auto"), "run")
    worker: Any = fleet.worker("one")
    worker.has_begun = True
    for method in ("end", "close"):
        getattr(worker._handle, method).remote.side_effect = AttributeError("core_worker")
    fleet.end()
    ray.kill.assert_called_once()
    ray.shutdown.assert_called_once()


def test_an_actor_that_cannot_be_made_is_told_with_its_traceback() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    trace = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch'"
    error = ModuleNotFoundError("No module named 'torch'")
    cause = exceptions.RayTaskError("__init__", trace, error, "ray::A", 7, "10.0.0.2")
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    done.set_exception(exceptions.ActorDiedError(cause))
    lost = _result(done)
    assert isinstance(lost, WorkerLost) and "No module named 'torch'" in str(lost)


@pytest.mark.long
def test_a_process_starts_one_ray_after_another_and_leaves_no_token(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    program = """
from torchbeast.on_ray.config import RayConfig
from torchbeast.on_ray.fleet import RayFleet
for _ in range(2):
    with RayFleet(RayConfig(), "run") as fleet:
        print(len(fleet.room().nodes))
"""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(
        command, capture_output=True, text=True, env=variables | {"HOME": str(tmp_path)}
    )
    assert ended.stdout.split() == ["1", "1"], ended.stderr
    assert not (tmp_path / ".ray").exists()
