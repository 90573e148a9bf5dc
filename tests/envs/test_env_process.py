# SPDX-License-Identifier: Apache-2.0
"""Environments in a child process act as in the program's own, and leave it alone."""

from __future__ import annotations

import functools
import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from background import Background, wait_for

from torchbeast import envs
from torchbeast.core.nest_py import flatten
from torchbeast.envs import env_process
from torchbeast.envs.env_process import EnvProcess
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import RunError, UsageError
from torchbeast.processes import child_process
from torchbeast.processes.supervisor import Supervisor


@pytest.fixture(autouse=True)
def _intrusive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the child import the environments, and none outlive the test."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    yield
    wait_for(lambda: not psutil.Process().children(recursive=True))


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


def test_a_hanging_constructor_is_told_and_ends_with_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(env_process, "_SAY_S", 0.0)
    supervisor = Supervisor()
    waits = iter([lambda: None, lambda: None, functools.partial(os.kill, os.getpid(), 15)])

    def check_goes_on() -> None:
        next(waits)()
        supervisor.check_goes_on()

    with supervisor.signals(), pytest.raises(RunError, match="the run has ended"):
        intrusive("Hangs", check_goes_on=check_goes_on)
    said = "Still waiting for intrusive_envs:Hangs to be made.\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("program", ["monobeast", "raybeast"])
def test_a_signal_while_an_environment_is_made_stops_the_program(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(f"torchbeast.{program}").main

    before = psutil.Process().children()  # an earlier test's process may still be ending

    def is_being_made() -> bool:
        started = set(psutil.Process().children()).difference(before)
        return any("env_process_main" in " ".join(child.cmdline()) for child in started)

    def stop() -> None:
        wait_for(is_being_made)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = Background(stop)
    assert main(["--env", "intrusive_envs:Hangs", "--savedir", str(tmp_path)]) == 0
    stopping.result()
    assert "Stopped by SIGTERM." in capsys.readouterr().out
