# SPDX-License-Identifier: Apache-2.0
"""The runner on Ray, with a Tune that plays trials in turn, and processes of no program."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_child import FakeChild
from sweeping import agent, finish, log

from torchbeast.errors import RunError, UsageError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.reporting.run_folder import RunFolder
from torchbeast.schemes import ray_replay
from torchbeast.schemes.room import Node, Room
from torchbeast.sources.sharing.service import Served
from torchbeast.sweep import program, ray_tune, trial
from torchbeast.sweep.config import SweepConfig
from torchbeast.sweep.record import Compared
from torchbeast.sweep.table import Row, said


class FakeScheduler:
    """Decides to stop the trials that the test names, at each of their results."""

    stopped: set[str]
    options: dict[str, Any]

    def __init__(self, **options: Any) -> None:
        FakeScheduler.options = options

    def on_trial_result(self, controller: Any, trial: Any, result: Any) -> str:
        return "STOP" if trial.config["agent"] in type(self).stopped else "CONTINUE"


class FakeTune(ModuleType):
    """Tune with room for so many trials, which it plays in turn in one process."""

    Trainable = Callback = Stopper = object

    def __init__(self, room: int = 99) -> None:
        super().__init__("tune")
        self.room, self.lost = room, ""  # lost: name of an agent whose node dies
        self.broken = False  # the connection to Ray
        self.options: dict[str, Any] = {}

    def grid_search(self, values: list[str]) -> list[str]:
        return values

    def run(self, made: type, *, config: Mapping[str, Any], stop: Any, **options: Any) -> None:
        self.options = options
        (callback,), scheduler = options["callbacks"], options["scheduler"]
        waiting, live = list(config["agent"]), []
        while (waiting or live) and not stop.stop_all():
            if self.broken:
                raise ConnectionError("GCS is gone")
            if waiting and len(live) < self.room:
                live.append(self._begin(made(), waiting.pop(0), callback))
            for each in list(live):
                if not self._play(each, callback, scheduler):
                    live.remove(each)

    def _begin(self, actor: Any, name: str, callback: Any) -> Any:
        actor.setup({"agent": name})
        error = ValueError("Traceback\nActorDiedError: its node has died")
        trial = SimpleNamespace(config={"agent": name}, actor=actor, get_error=lambda: error)
        callback.on_trial_start(trial=trial)
        return trial

    def _play(self, trial: Any, callback: Any, scheduler: Any) -> bool:
        """Returns whether the trial goes on."""
        if trial.config["agent"] == self.lost:
            callback.on_trial_error(trial=trial)
            return False
        result = trial.actor.step()
        if scheduler.on_trial_result(None, trial, result) == "STOP":
            raise AssertionError("Tune would end the agent before it can write its checkpoint")
        callback.on_trial_result(trial=trial, result=result)
        return not result.get("done")


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch, fakes: None) -> None:
    FakeChild.are_asked_together = False
    FakeScheduler.stopped = set()
    schedulers = SimpleNamespace(
        AsyncHyperBandScheduler=FakeScheduler,
        FIFOScheduler=FakeScheduler,
        TrialScheduler=SimpleNamespace(STOP="STOP", CONTINUE="CONTINUE"),
    )
    for name in ("ray", "ray.tune"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.tune.schedulers", schedulers)
    monkeypatch.setattr(trial, "_EVERY_S", 0.0)
    monkeypatch.setattr(ray_tune, "_EVERY_S", 0.01)


Step = Callable[[], bool]  # an action of the test, which returns whether it was time for it


def run(
    tune: FakeTune,
    rows: list[Row],
    script: list[Step],
    joining: ray_tune.Joining = ray_tune.NO_REPLAY,
    **config: Any,
) -> Supervisor:
    """Runs agents; the next step of the script is taken when its time has come."""
    supervisor, steps = Supervisor(), list(script)

    def show() -> None:
        if steps and steps[0]():
            steps.pop(0)

    runner = ray_tune.TuneRunner(tune, SweepConfig(on="ray", **config), "Ray", joining)
    STOP.clear()
    STOP.append(lambda: supervisor.stop("SIGINT"))
    runner.run(rows, supervisor, show)
    assert not steps, "the runner ended before the script"
    return supervisor


STOP: list[Callable[[], None]] = []


def rows_of(folder: Path, count: int) -> list[Row]:
    return [Row(agent(folder, seed=str(seed))) for seed in range(count)]


def end(index: int, report: dict[str, Any], step: int = 0) -> Step:
    """Ends a process once it runs."""

    def body() -> bool:
        if len(FakeChild.made) <= index:
            return False
        return _end(FakeChild.made[index], report, step)

    return body


def _end(child: FakeChild, report: dict[str, Any], step: int) -> bool:
    folder = Path(child.words[0]) if child.words else None
    if step and folder is not None:
        log(folder, [(step, 1, 0.0)])
    child.finish(report)
    return True


def are(rows: list[Row], *states: str) -> bool:
    return [row.state for row in rows] == list(states)


DONE = {"ended": True}


def with_folders(rows: list[Row]) -> list[Row]:
    """Lets the fake children know where their agents log."""
    for row in rows:
        object.__setattr__(row.agent, "words", [str(row.agent.folder)])
    return rows


def test_agents_run_as_trials_and_those_that_are_done_are_left_alone(tmp_path: Path) -> None:
    rows, tune = with_folders(rows_of(tmp_path, 3)), FakeTune()
    rows[1].state = "done"
    run(tune, rows, [end(0, DONE, 100), end(1, DONE, 100)], agent_cpus=2.0, parallel=2)
    assert are(rows, "done", "done", "done") and len(FakeChild.made) == 2
    assert tune.options["resources_per_trial"] == {"cpu": 2.0, "gpu": 0.0}
    assert tune.options["max_concurrent_trials"] == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_agents_fail_with_their_own_words_or_those_of_ray_and_others_go_on(tmp_path: Path) -> None:
    rows, tune = with_folders(rows_of(tmp_path, 3)), FakeTune()
    tune.lost = "seed=2"
    supervisor = run(tune, rows, [end(0, {"ended": True, "why": "no"}), end(1, DONE, 100)])
    assert are(rows, "failed", "done", "failed") and not supervisor.ended
    assert rows[0].why == "no"
    assert rows[2].why == "Ray lost it: ActorDiedError: its node has died"


def test_an_agent_that_the_scheduler_stops_is_asked_to_end_and_says_where(tmp_path: Path) -> None:
    rows, tune = with_folders(rows_of(tmp_path, 2)), FakeTune()

    def decide() -> bool:
        if not are(rows, "running", "running") or len(FakeChild.made) < 2:
            return False
        log(rows[0].agent.folder, [(40, 1, 0.0)])
        FakeScheduler.stopped.add("seed=0")
        return True

    stopped = lambda: rows[0].state == "stopped by the scheduler"  # noqa: E731
    run(tune, rows, [decide, stopped, end(1, DONE, 100)], scheduler="asha")
    assert are(rows, "stopped by the scheduler", "done")
    assert said(rows[0]) == "stopped by the scheduler at step 40"
    assert [child.times_asked for child in FakeChild.made] == [1, 0]
    assert FakeScheduler.options["time_attr"] == "step"
    assert FakeScheduler.options["metric"] == "mean_episode_return"


def test_a_stop_lets_agents_end_and_begins_no_other(tmp_path: Path) -> None:
    rows, tune = rows_of(tmp_path, 3), FakeTune(room=2)

    def stop() -> bool:
        if not are(rows, "running", "running", "waiting") or len(FakeChild.made) < 2:
            return False
        STOP[0]()
        return True

    supervisor = run(tune, rows, [stop])
    assert are(rows, "stopped", "stopped", "waiting") and supervisor.ended
    assert [child.times_asked for child in FakeChild.made] == [1, 1]


def test_agents_that_wait_are_told_of_a_stop_before_any_that_makes_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, told = rows_of(tmp_path, 3), list[str]()
    monkeypatch.setattr(trial.Requests, "add", lambda _, name: told.append(name))
    trials = ray_tune._Trials(
        {row.agent.name: row for row in rows}, trial.Requests(tmp_path), SimpleQueue()
    )
    for row in rows[:2]:
        row.start()
    trials.stop()
    assert told[0] == "seed=2" and sorted(told[1:]) == ["seed=0", "seed=1"]


@pytest.mark.parametrize("successful", [True, False])
def test_an_agent_whose_trial_ends_without_a_word_was_stopped_if_its_checkpoint_is_there(
    tmp_path: Path, successful: bool
) -> None:
    (row,) = rows_of(tmp_path, 1)
    log(row.agent.folder, [(10, 1, 0.0)])
    finish(row.agent.folder, successful)
    trials = ray_tune._Trials({"seed=0": row}, trial.Requests(tmp_path), None)
    row.start()
    row.follow()
    trials.stop()
    trials.end("its trial was lost")
    assert row.state == ("stopped" if successful else "failed")


def test_an_agent_that_waits_for_another_process_in_its_folder_says_so(tmp_path: Path) -> None:
    rows, tune = with_folders(rows_of(tmp_path, 1)), FakeTune()
    earlier = RunFolder(rows[0].agent.folder, {}, [])

    def release() -> bool:
        if said(rows[0]) != "waiting for another process in its folder":
            return False
        earlier.finish(successful=False)
        return True

    run(tune, rows, [release, lambda: said(rows[0]) == "running", end(0, DONE)])


def test_the_end_of_ray_is_the_failure_of_the_sweep(tmp_path: Path) -> None:
    rows, tune = rows_of(tmp_path, 1), FakeTune()

    def lose() -> bool:
        tune.broken = rows[0].state == "running"
        return tune.broken

    supervisor = run(tune, rows, [lose])
    assert are(rows, "failed") and "GCS is gone" in str(supervisor.failure)


def test_without_tune_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["ray"], "__path__", [], raising=False)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(RunError, match=r"pip install 'torchbeast\[tune\]'"):
        ray_tune._import_tune()


def test_an_agent_that_no_node_has_room_for_is_refused() -> None:
    room = Room([Node("a", 4, 0, True, 0), Node("b", 2, 1, False, 0)], 6)
    for cpus, gpus in ((4, 0), (2, 1)):
        ray_tune.check_room(SweepConfig(on="ray", agent_cpus=cpus, agent_gpus=gpus), room)
    for cpus, gpus in ((5, 0), (4, 1), (1, 2)):
        with pytest.raises(UsageError, match="no node has room for an agent with --agent_cpus"):
            ray_tune.check_room(SweepConfig(on="ray", agent_cpus=cpus, agent_gpus=gpus), room)


@pytest.mark.parametrize(("total", "first"), [(27_000, 1000), (20_000, 740), (5, 1)])
def test_asha_compares_three_times_before_the_end(total: int, first: int) -> None:
    assert ray_tune.rungs(total) == (first, 9 * first)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scheduler": "asha"},
        {"agent_cpus": 2.0},
        {"agent_gpus": 1.0},
        {"on": "ray", "agent_cpus": 0.0},
        {"on": "ray", "address": "ray://head:10001"},
    ],
)
def test_settings_that_do_not_fit_to_where_agents_learn_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SweepConfig(**wrong)


def test_agents_of_raybeast_cannot_be_trials() -> None:
    what = Compared(set={"seed": ["1"]}, words=[], program="raybeast", shared_replay=False)
    with pytest.raises(UsageError, match="use Ray themselves"):
        program._check_on_ray(SweepConfig(on="ray"), what)
    program._check_on_ray(SweepConfig(), what)


def test_agents_are_told_where_their_replay_and_its_cluster_are(tmp_path: Path) -> None:
    rows, tune = rows_of(tmp_path, 2), FakeTune()
    joining = ray_tune.Joining(["--replay_service=ray:a"], {"RAY_ADDRESS": "10.0.0.1:6379"})
    run(tune, rows, [end(0, DONE), end(1, DONE)], joining, agent_cpus=3.0)
    for child in FakeChild.made:
        assert child.words[-1] == "--replay_service=ray:a"
        assert child.environment["RAY_ADDRESS"] == "10.0.0.1:6379"
        assert child.environment["TORCHBEAST_CORES"] == "3"


class FakeFleet:
    """A cluster with two free CPUs."""

    made: list[tuple[Any, ...]]
    cluster, own_node = "10.0.0.1:6379", "here"

    def __init__(self, config: Any, name: str, own_code: bool, user: Any) -> None:
        FakeFleet.made = [(config.address, name, own_code, user)]

    def __enter__(self) -> FakeFleet:
        return self

    def __exit__(self, *_: object) -> None:
        FakeFleet.made.append(("ended",))

    def room(self) -> Room:
        return Room([Node("a", 2, 0, True, 0)], 2.0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def serving(name: str, **options: Any) -> Iterator[Served]:
        FakeFleet.made.append((name, options))
        yield Served(f"ray:{name}")
        FakeFleet.made.append(("over",))

    monkeypatch.setattr(ray_tune, "RayFleet", FakeFleet)
    monkeypatch.setattr(ray_tune, "serving_on_ray", serving)
    monkeypatch.setattr(ray_tune, "replay_name", lambda sweep: f"{sweep}-1")
    monkeypatch.setattr(ray_tune, "_import_tune", FakeTune)
    monkeypatch.setattr(ray_tune, "_is_own_code", lambda agents: False)


def test_a_shared_replay_is_on_the_node_of_the_sweep_and_ends_before_the_connection(
    tmp_path: Path, cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    agents = [row.agent for row in rows_of(tmp_path / "lr", 3)]
    with ray_tune.on_ray(SweepConfig(on="ray", address="auto"), agents, True) as (runner, served):
        assert served is not None and served.address == "ray:lr-1"
        assert runner._joining.words == ["--replay_service=ray:lr-1"]
        assert runner._joining.environment == {"RAY_ADDRESS": "10.0.0.1:6379"}
    assert "2 of 3 agents begin now: the others" in capsys.readouterr().out
    (connected, started, *ends) = FakeFleet.made
    assert connected[:3] == ("auto", "sweep lr", False)
    assert started == ("lr-1", {"num_cpus": 0.0, "node": "here"})
    assert ends == [("over",), ("ended",)]


def test_agents_outlive_their_trials_to_write_a_checkpoint(tmp_path: Path, cluster: None) -> None:
    agents = [row.agent for row in rows_of(tmp_path / "lr", 3)]
    with ray_tune.on_ray(SweepConfig(on="ray"), agents, False) as (runner, served):
        assert served is None and runner._joining == ray_tune.NO_REPLAY
    user = FakeFleet.made[0][3]
    assert user.environment == {"RAY_kill_child_processes_on_worker_exit": "false"}
    assert user.name == "sweep" and "--name" in user.how_to_go_on


def test_a_replay_of_a_sweep_has_a_name_of_its_own_that_ray_takes() -> None:
    names = [ray_tune.replay_name(name) for name in ("lr", "lr", "a b/ü,=:")]
    assert len(set(names)) == 3
    for name, begins in zip(names, ["sweep-lr-", "sweep-lr-", "sweep-a_b"], strict=True):
        assert name.startswith(begins) and ray_replay.checked_name(name) == name


@pytest.mark.parametrize(
    ("free", "config", "expected"),
    [
        (4.0, {}, 4),
        (3.9, {}, 3),
        (9.0, {}, 5),
        (9.0, {"parallel": 2}, 2),
        (4.0, {"agent_cpus": 2.0}, 2),
    ],
)
def test_agents_that_share_a_replay_learn_together_as_far_as_there_is_room(
    free: float, config: dict[str, Any], expected: int
) -> None:
    room = Room([Node("a", 16, 0, True, 0)], free)
    assert ray_tune.agents_at_once(SweepConfig(on="ray", **config), room, agents=5) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"agent_gpus": 1.0}, 3),
        ({"agent_gpus": 0.5}, 5),
        ({"agent_gpus": 2.0}, 1),
        ({"agent_cpus": 2.0}, 2),
    ],
)
def test_an_agent_has_room_on_one_node_only(config: dict[str, Any], expected: int) -> None:
    """What is left on several of them is of no use to it."""
    room = Room([Node("a", 3, 2, True, 0), Node("b", 3, 1, False, 0)], 6.0)
    assert ray_tune.agents_at_once(SweepConfig(on="ray", **config), room, agents=5) == expected


def test_the_command_that_continues_a_sweep_runs_it_in_the_same_place() -> None:
    config = SweepConfig(on="ray", address="auto", agent_cpus=2.0)
    words = program._words_of_ray(config)
    assert words == ["--on=ray", "--address=auto", "--agent_cpus=2.0"]
    assert program._words_of_ray(SweepConfig()) == []
