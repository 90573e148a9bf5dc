# SPDX-License-Identifier: Apache-2.0
"""Environments in a child process act as in the program's own, and leave it alone."""

from __future__ import annotations

import contextlib
import importlib
import os
import queue
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from background import SOON, Background, wait_for
from intrusive_envs import PICTURE
from warm import children

from torchbeast import envs
from torchbeast.core.base.nest import flatten
from torchbeast.envs.env_process import EnvProcess
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets import child_process, waiting
from torchbeast.fleets.supervisor import Supervisor


@pytest.fixture(autouse=True)
def _intrusive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the child import the environments, and none outlive the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    yield
    wait_for(lambda: not children(recursive=True))


def intrusive(name: str, **options: Any) -> EnvProcess:
    return EnvProcess(EnvSpec(f"intrusive_envs:{name}"), 1, **options)


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_the_same_seed_and_actions_give_the_same_steps_as_in_this_process() -> None:
    """Episodes end by themselves and by a time limit, which gives a last observation."""
    spec = EnvSpec("CartPole-v1", {"max_episode_steps": 12})
    drawn = np.random.default_rng(0).integers(0, 2, (60, 3))
    with closing(EnvProcess(spec, 3)) as there, closing(envs.make(spec, 3)) as here:
        for name in ("num_envs", "env_id", "observation_space", "action_space", "frame_stack"):
            assert getattr(there, name) == getattr(here, name)
        assert np.array_equal(there.reset(7), here.reset(7))
        ends = np.zeros(2)
        for action in drawn:
            ours, theirs = (flatten(env.step(action)) for env in (there, here))
            assert [(a.dtype, a.tolist()) for a in ours if a is not None] == [
                (a.dtype, a.tolist()) for a in theirs if a is not None
            ]
            ends += [theirs[2].sum(), theirs[3].sum()]
        assert ends.min() > 0
        assert there.render() is None


def test_what_an_environment_sets_for_its_process_is_not_set_here() -> None:
    def state() -> Any:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return handlers, os.getcwd(), os.environ.get("INTRUDED"), np.geterr()

    before = state()
    with closing(intrusive("TakesOver")) as env:
        assert env.reset(0).item() != os.getpid()
    assert state() == before


@pytest.mark.parametrize("name", ["StopsHelper", "LeavesHelper"])
def test_a_process_that_an_environment_forked_ends_with_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_GRACE_S", 0.5)
    env = intrusive(name)
    helper = int(env.reset(0).item())
    assert not has_ended(helper)
    env.close()
    wait_for(lambda: has_ended(helper))


def test_an_error_is_told_although_a_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_GRACE_S", 0.5)
    with pytest.raises(
        RunError, match="^intrusive_envs:FailsWithHelper cannot be made: (?s:.*)joy"
    ):
        intrusive("FailsWithHelper")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Exits", "^intrusive_envs:Exits failed: Traceback(?s:.*)SystemExit: bye$"),
        ("Crashes", "^intrusive_envs:Crashes: process .* exited with code 7(?s:.*)last words$"),
    ],
)
def test_an_environment_that_ends_its_process_is_an_error_of_every_later_call(
    name: str, said: str
) -> None:
    with closing(intrusive(name)) as env:
        env.reset(0)
        for call in (env.step, env.step, env.reset):
            with pytest.raises(RunError, match=said):
                call(np.zeros(1, np.int64))


def test_a_wrong_name_is_refused() -> None:
    with pytest.raises(UsageError, match="the module intrusive_envs has no 'Calm'"):
        intrusive("Calm")


@pytest.mark.parametrize(
    ("name", "picture"), [("Painted-v0", PICTURE.tolist()), ("paints_differently", None)]
)
def test_only_a_picture_of_gymnasiums_kind_leaves_the_process(name: str, picture: Any) -> None:
    with closing(intrusive(name, render=True)) as env:
        env.reset(0)
        found = env.render()
    assert (None if found is None else found.tolist()) == picture


def test_a_closed_environment_has_ended() -> None:
    env = intrusive("Quiet")
    pid = int(env.reset(0).item())
    env.close()
    assert has_ended(pid)


def test_the_answer_of_a_call_that_was_given_up_is_not_another_calls(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    ends: Iterator[bool] = iter([])

    def check_goes_on() -> None:
        if next(ends, False):
            raise RunError("it is over")

    spec = EnvSpec("intrusive_envs:Waits", {"path": str(tmp_path / "pipe")})
    with closing(EnvProcess(spec, 1, check_goes_on=check_goes_on)) as env:
        env.reset(0)
        ends = iter([False, True])  # when the call begins, and once it waits
        with pytest.raises(RunError, match="it is over"):
            env.step(np.zeros(1, np.int64))
        os.write(pipe, b"1")
        with pytest.raises(RunError, match="Waits: an earlier call was abandoned"):
            env.reset(0)
    os.close(pipe)


def test_a_hanging_constructor_is_told_and_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(waiting, "WAIT_S", 0.0)
    monkeypatch.setattr(waiting, "_LOOK_S", 0.001)
    monkeypatch.setattr(waiting, "warn", said.put)
    found: list[str] = []
    supervisor = Supervisor()
    waits = iter(
        [
            lambda: None,
            lambda: found.append(said.get(timeout=SOON)),
            lambda: os.kill(os.getpid(), signal.SIGTERM),
        ]
    )

    def check_goes_on() -> None:
        next(waits)()
        supervisor.check_goes_on()

    with supervisor.signals(), pytest.raises(RunError, match="the run has ended"):
        intrusive("Hangs", check_goes_on=check_goes_on)
    assert found == ["waiting for intrusive_envs:Hangs to be made, for 0 s so far"]


@pytest.mark.parametrize("program", ["monobeast", "raybeast"])
def test_a_signal_while_an_environment_is_made_stops_the_program(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"torchbeast.{program}").main

    before = psutil.Process().children()  # an earlier test's process may still be ending

    def is_being_made() -> bool:
        started = set(psutil.Process().children()).difference(before)
        with contextlib.suppress(psutil.NoSuchProcess):  # another one that has just ended
            return any("env_worker" in " ".join(child.cmdline()) for child in started)
        return False

    def stop() -> None:
        wait_for(is_being_made)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = Background(stop)
    assert main(["--env", "intrusive_envs:Hangs", "--savedir", str(tmp_path)]) == 0
    stopping.result()
    assert "Stopped by SIGTERM." in capsys.readouterr().out
