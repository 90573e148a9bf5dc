# SPDX-License-Identifier: Apache-2.0
"""The agents of a sweep on a cluster that is played by threads, with processes of no program."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from background import SOON, wait_for
from fake_child import FakeChild
from sweeping import agent, log

from torchbeast.collect.shared_replay import Served
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.fleet import WorkerLost
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.on_ray.config import Node, Room
from torchbeast.sweep import __main__ as program
from torchbeast.sweep import on_ray
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.table import AgentRow

Then = Callable[[Any], None]


class FakeWorker:
    """An actor with a thread for its calls and one for `ask_to_end`, which begins when it may."""

    def __init__(self, actor: Any) -> None:
        self.actor, self.is_killed = actor, False
        self._calls: dict[bool, queue.SimpleQueue[tuple[Then, str, Any]]] = {}
        self._lost: list[Then] = []
        for is_asking in (False, True):
            self._calls[is_asking] = queue.SimpleQueue()

    def begin(self) -> None:
        for calls in self._calls.values():
            threading.Thread(target=self._work, args=(calls,), daemon=True).start()

    def _work(self, calls: queue.SimpleQueue[tuple[Then, str, Any]]) -> None:
        while True:
            then, method, arguments = calls.get()
            then(getattr(self.actor, method)(*arguments))

    def call(self, then: Then, method: str, *arguments: Any) -> None:
        self._lost.append(then)
        self._calls[method == "ask_to_end"].put((then, method, arguments))

    def lose(self, error: Exception) -> None:
        for then in self._lost:
            then(error)

    def kill(self) -> None:
        self.is_killed = True


class FakeFleet:
    """A cluster with room for so many agents; a killed one makes room for the next."""

    cluster, own_node = "10.0.0.1:6379", "here"

    def __init__(self, room: int = 99) -> None:
        self._room, self.workers, self.is_lost = room, list[FakeWorker](), False
        self._begun: list[FakeWorker] = []
        self.events: list[tuple[Any, ...]] = []

    def __call__(self, config: Any, name: str, own_code: bool, user: Any, actors: Any) -> FakeFleet:
        self.events.append((config.address, name, user, actors))
        return self

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.events.append(("ended",))

    def room(self) -> Room:
        return Room([Node("a", 2, 0, True, 0)], 2.0)

    def worker(self, name: str) -> FakeWorker:
        if self.is_lost:
            raise RunError("GCS is gone")
        self.workers.append(FakeWorker(on_ray.SweepAgent(name)))
        self.make_room()
        return self.workers[-1]

    def make_room(self) -> None:
        for worker in self.workers:
            alive = [begun for begun in self._begun if not begun.is_killed]
            is_pending = worker not in self._begun and not worker.is_killed
            if is_pending and len(alive) < self._room:
                self._begun.append(worker)
                worker.begin()


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, fakes: None) -> FakeFleet:
    @contextmanager
    def serving(name: str, **options: Any) -> Iterator[Served]:
        made.events.append((name, options))
        yield Served(f"ray:{name}")
        made.events.append(("over",))

    FakeChild.ends_when_asked = True
    monkeypatch.setattr(on_ray, "_EVERY_S", 0.0)
    made = FakeFleet()
    monkeypatch.setattr(on_ray, "RayFleet", made)
    monkeypatch.setattr(on_ray, "serving_on_ray", serving)
    monkeypatch.setattr(on_ray, "replay_name", lambda sweep: f"{sweep}-1")
    return made


def rows_of(folder: Path, count: int) -> list[AgentRow]:
    folder.mkdir(exist_ok=True)
    return [AgentRow(agent(folder, seed=str(seed))) for seed in range(count)]


Step = Callable[[], bool]  # an action of the test, which returns whether it was time for it


def run(
    fleet: FakeFleet, rows: list[AgentRow], script: list[Step], shared_replay: bool = False
) -> Supervisor:
    """Runs agents; the next step of the script is taken when its time has come."""
    supervisor, steps, deadline = Supervisor(), list(script), time.monotonic() + SOON

    def show() -> None:
        fleet.make_room()
        if steps and steps[0]():
            steps.pop(0)
        if not steps or time.monotonic() > deadline:
            supervisor.stop("SIGINT")

    agents = [row.agent for row in rows]
    config = SweepConfig(on="ray", address="auto", agent_cpus=2.0, shared_replay=shared_replay)
    with ExitStack() as ending:
        runner, _ = on_ray.on_ray(ending, config, agents)
        runner.run(rows, supervisor, show)
    assert not steps, "the runner ended before the script"
    return supervisor


def states(rows: list[AgentRow]) -> list[str]:
    return [row.state for row in rows]


def child(row: AgentRow) -> FakeChild:
    (found,) = (made for made in FakeChild.made if made.name == row.agent.name)
    return found


def ends(row: AgentRow, report: dict[str, Any] | None) -> Step:
    """Ends an agent's process once it runs."""

    def body() -> bool:
        if row.agent.name not in [made.name for made in FakeChild.made]:
            return False
        child(row).finish(report)
        return True

    return body


def test_agents_begin_when_there_is_room_and_fail_with_their_own_words_or_those_of_ray(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    fleet._room, rows = 2, rows_of(tmp_path / "lr", 4)
    log(rows[0].agent.folder, [(100, 1, 0.0)])

    def lost() -> bool:
        fleet.workers[3].lose(WorkerLost("its node has left the cluster", has_left=True))
        return True

    run(
        fleet,
        rows,
        [
            lambda: states(rows) == ["running", "running", "waiting", "waiting"],
            ends(rows[0], {"ended": True}),
            lambda: states(rows) == ["done", "running", "running", "waiting"],
            ends(rows[1], {"ended": True, "why": "no"}),
            ends(rows[2], None),
            lambda: states(rows) == ["done", "failed", "failed", "running"],
            lost,
            lambda: states(rows) == ["done", "failed", "failed", "failed"],
        ],
    )
    assert [row.why for row in rows[1:]] == [
        "no",
        "process 1 was killed by SIGKILL",
        "lost by Ray: its node has left the cluster",
    ]
    assert all(worker.is_killed for worker in fleet.workers)
    actors = fleet.events[0][3]
    assert actors.resources == {"num_cpus": 2.0, "num_gpus": 0.0}


def test_a_stop_lets_agents_end_and_begins_no_other(tmp_path: Path, fleet: FakeFleet) -> None:
    fleet._room, rows = 2, rows_of(tmp_path / "lr", 3)
    run(fleet, rows, [lambda: states(rows) == ["running", "running", "waiting"]])
    assert [made.times_asked for made in FakeChild.made] == [1, 1]
    assert states(rows) == ["stopped", "stopped", "waiting"]
    assert all(worker.is_killed for worker in fleet.workers)


def test_an_agent_that_is_asked_to_end_before_its_process_is_there_is_told(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    (row,) = rows_of(tmp_path / "lr", 1)
    actor = on_ray.SweepAgent(row.agent.name)
    actor.ask_to_end()
    threading.Thread(target=actor.run, args=(row.agent, 1, [], {}), daemon=True).start()
    wait_for(lambda: FakeChild.made and FakeChild.made[0].asked)


def test_the_end_of_the_connection_to_ray_ends_the_sweep(tmp_path: Path, fleet: FakeFleet) -> None:
    rows = rows_of(tmp_path / "lr", 1)
    fleet.is_lost = True
    supervisor = run(fleet, rows, [lambda: True])
    assert "GCS is gone" in str(supervisor.failure)


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path: Path, fleet: FakeFleet) -> None:
    row = AgentRow(agent(tmp_path / "elsewhere", seed="1"))
    process = on_ray.ProcessOnRay(fleet, row, 1, [], {})  # type: ignore[arg-type]
    wait_for(lambda: process.has_ended)
    row.end()
    assert "cannot access the sweep's folder" in row.why and "--savedir" in row.why
    assert not FakeChild.made


def test_agents_that_share_a_replay_are_told_where_it_and_its_cluster_are(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    """The replay is on the node of the sweep and ends before the connection."""
    rows = rows_of(tmp_path / "lr", 3)
    run(fleet, rows, [lambda: states(rows) == ["running"] * 3], shared_replay=True)
    for made in FakeChild.made:
        assert made.words[-1] == "--replay_service=ray:lr-1"
        assert made.environment["RAY_ADDRESS"] == "10.0.0.1:6379"
        assert made.environment["TORCHBEAST_CORES"] == "2"
    (connected, started, *last) = fleet.events
    assert connected[:2] == ("auto", "sweep lr")
    assert started == ("lr-1", {"num_cpus": 0.0, "node": "here"})
    assert last == [("over",), ("ended",)]


def test_agents_outlive_their_actors_to_write_a_checkpoint(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    run(fleet, rows_of(tmp_path / "lr", 1), [lambda: True])
    user = fleet.events[0][2]
    assert user.environment == {"RAY_kill_child_processes_on_worker_exit": "false"}
    assert user.name == "sweep" and "--name" in user.how_to_go_on


def test_an_agent_that_no_node_has_room_for_is_refused(tmp_path: Path, fleet: FakeFleet) -> None:
    agents = [row.agent for row in rows_of(tmp_path / "lr", 1)]
    for more in ({"agent_cpus": 3.0}, {"agent_gpus": 1.0}):
        with pytest.raises(UsageError, match="1 agent with .* not fit"):
            config = SweepConfig(on="ray", **more)  # type: ignore[arg-type]
            with ExitStack() as ending:
                on_ray.on_ray(ending, config, agents)


@pytest.mark.parametrize(
    "wrong",
    [
        {"agent_cpus": 2.0},
        {"agent_gpus": 1.0},
        {"on": "ray", "agent_cpus": 0.0},
        {"on": "ray", "address": "ray://head:10001"},
        {"rounds": 5},
    ],
)
def test_settings_that_do_not_fit_to_where_agents_learn_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SweepConfig(**wrong)


def test_agents_of_raybeast_cannot_run_on_ray(tmp_path: Path) -> None:
    words = ["--set", "seed=1", "--program", "raybeast", "--on", "ray", "--savedir", str(tmp_path)]
    with pytest.raises(UsageError, match="use Ray themselves"):
        program.sweep(words)


def test_a_replay_of_a_sweep_has_a_name_of_its_own_that_ray_takes() -> None:
    names = [on_ray.replay_name(name) for name in ("lr", "lr", "a b/ü,=:")]
    assert len(set(names)) == 3
    for name, begins in zip(names, ["sweep-lr-", "sweep-lr-", "sweep-a_b"], strict=True):
        assert re.fullmatch(rf"{begins}[\w.-]*", name)


def test_an_address_without_ray_says_what_it_needs(tmp_path: Path) -> None:
    words = ["--set", "seed=1", "--env", "Catch", "--address", "auto", "--savedir", str(tmp_path)]
    with pytest.raises(UsageError, match="add --on ray"):
        program.sweep(words)
