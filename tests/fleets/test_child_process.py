# SPDX-License-Identifier: Apache-2.0
"""Every kind of end of a child process is reported once, unless it was asked for."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from background import SOON, a_fork, wait_for

import torchbeast
from torchbeast.envs.spec import EnvError
from torchbeast.errors import RunError, UsageError, failure
from torchbeast.fleets import child_process
from torchbeast.fleets.child_process import ChildProcess, ProcessDied, end_all

FOLDERS = [str(Path(__file__).parent), str(Path(torchbeast.__file__).parents[1])]


class Child:
    """A child of children.py, with its reports and its end."""

    def __init__(self, do: str, padding: str = "", **options: Any) -> None:
        self.reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.ends: queue.Queue[Exception] = queue.Queue()
        self.process = ChildProcess(
            f"the {do}",
            "children",
            {"do": do, "padding": padding},
            on_report=self.reports.put,
            on_end=self.ends.put,
            **options,
        )

    def report(self) -> dict[str, Any]:
        return self.reports.get(timeout=SOON)

    def end(self) -> Exception:
        return self.ends.get(timeout=SOON)


@pytest.fixture
def start() -> Iterator[Any]:
    children: list[Child] = []

    def started(do: str, **options: Any) -> Child:
        children.append(Child(do, **options))
        return children[-1]

    yield started
    end_all(child.process for child in children)


def test_a_child_receives_messages_and_sends_reports(start: Any) -> None:
    child = start("echo")
    for number in range(3):
        child.process.send({"number": number})
    assert [child.report() for _ in range(3)] == [{"heard": {"number": n}} for n in range(3)]


def test_arguments_may_be_longer_than_a_word_of_a_command_line(start: Any) -> None:
    child = start("echo", padding="x" * 1_000_000)
    child.process.send({"number": 1})
    assert child.report() == {"heard": {"number": 1}}


def test_a_child_that_is_asked_to_end_ends_without_a_failure(start: Any) -> None:
    child = start("echo")
    child.process.send({})
    child.report()
    end_all([child.process])
    assert not psutil.pid_exists(child.process.pid)
    assert child.ends.empty()
    child.process.send({"too": "late"})  # nothing happens
    end_all([child.process])  # nor now


def test_a_child_that_is_asked_to_end_ends_although_a_fork_of_the_program_lives(start: Any) -> None:
    child = start("echo")
    with a_fork():
        child.process.ask_to_end()
        wait_for(lambda: child.process.has_ended)


def test_a_failure_of_a_child_that_is_asked_to_end_is_logged(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    child = start("fail_at_the_end")
    end_all([child.process])
    said = "the fail_at_the_end failed while closing: the port was never freed"
    assert said in caplog.messages and child.ends.empty()


def test_an_unknown_error_of_a_child_is_reported_with_its_traceback(start: Any) -> None:
    error = start("unknown_error").end()
    assert type(error) is RunError
    assert "KeyError: 'the joystick is gone'" in str(error)
    assert "children.py" in str(error) and "in fail" in str(error)


def test_a_child_that_nobody_can_watch_is_ended(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads in this process may be beyond the limit of threads."""
    before = {child.pid for child in psutil.Process().children()}
    made: list[subprocess.Popen[bytes]] = []

    def refused(thread: Any) -> Any:
        raise RunError("no thread can be started")

    class Popen(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(child_process, "started", refused)
    monkeypatch.setattr("torchbeast.fleets.child_process.subprocess.Popen", Popen)
    with pytest.raises(RunError, match="no thread"):
        start("echo")
    assert [process.returncode for process in made] == [-signal.SIGKILL]
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_run_error_of_a_child_is_reported_as_one_sentence(start: Any) -> None:
    error = start("known_error").end()
    assert type(error) is RunError and str(error) == "the cartridge cannot be read"


def test_only_errors_of_our_own_types_lose_their_traceback() -> None:
    """Environments raise all the others, for example when their simulator does not answer."""
    for theirs in (ConnectionError, ValueError, RuntimeError, OSError):
        try:
            raise theirs("the simulator is gone")
        except theirs as error:
            said = failure(error)
        assert said["error"].startswith("Traceback") and not said["usage"]
        assert __file__ in said["error"]
    assert failure(RunError("no")) == {"error": "no", "usage": False}
    assert failure(EnvError("no")) == {"error": "no", "usage": True}


def test_a_wrong_name_is_a_usage_error(start: Any) -> None:
    error = start("wrong_name").end()
    assert type(error) is UsageError and str(error) == "there is no Pnog"


def test_a_crash_is_reported_with_exit_code_and_last_output(start: Any) -> None:
    child = start("crash")
    error = child.end()
    assert type(error) is ProcessDied
    first, *said = str(error).split("\n")
    assert first == f"process {child.process.pid} exited with code 3; last output:"
    assert said == [f"  line {number}" for number in range(10, 30)]


def test_a_killed_child_is_reported_with_the_signal(start: Any) -> None:
    child = start("echo")
    child.process.send({})
    child.report()
    os.kill(child.process.pid, signal.SIGKILL)
    assert str(child.end()) == f"process {child.process.pid} was killed by SIGKILL"
    assert child.ends.empty(), "once"


def test_the_end_of_a_child_is_noticed_while_a_process_that_it_forked_lives_on(start: Any) -> None:
    child = start("leave_a_child")
    assert "exited with code 3" in str(child.end())
    forked = child.report()["pid"]
    wait_for(lambda: not is_alive(forked))


def test_processes_that_a_child_forked_end_when_it_is_asked_to_end(start: Any) -> None:
    child = start("end_before_a_child")
    forked = child.report()["pid"]
    assert is_alive(forked)
    end_all([child.process])
    wait_for(lambda: not is_alive(forked))
    assert child.ends.empty()


@pytest.mark.parametrize("do", ["outlive_parent", "outlive_parent_stuck"])
def test_processes_that_a_child_forked_end_with_it_when_its_parent_is_killed(do: str) -> None:
    code = (
        "import sys, time\n"
        "from torchbeast.fleets.child_process import ChildProcess\n"
        "ChildProcess('a', 'children', {'do': sys.argv[1]}, lambda report: print(\n"
        "    report['pid'], flush=True), print)\n"
        f"time.sleep({SOON})\n"
    )
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)}
    words = [sys.executable, "-c", code, do]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=path) as parent:
        assert parent.stdout is not None
        forked = int(parent.stdout.readline())
        assert is_alive(forked)
        parent.kill()
    wait_for(lambda: not is_alive(forked))


@pytest.mark.parametrize("do", ["outlive_parent", "outlive_parent_stuck"])
def test_a_child_ends_with_its_own_exit_code_when_its_parent_asks_it_to(
    start: Any, do: str
) -> None:
    child = start(do)
    child.report()
    end_all([child.process])
    assert child.process._process.returncode == 0


def is_alive(pid: int) -> bool:
    """Returns whether the process runs; a zombie, which its parent has to reap, does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_child_that_is_given_up_is_reported_with_the_reason(start: Any) -> None:
    child = start("hang")
    child.report()
    child.process.give_up("was given up: it does nothing")
    assert str(child.end()) == f"process {child.process.pid} was given up: it does nothing"


def test_an_incomplete_report_is_ignored(start: Any) -> None:
    child = start("crash_within_a_report")
    assert isinstance(child.end(), ProcessDied)
    assert child.reports.empty()


@pytest.mark.parametrize("do", ["chat", "print_early"])
def test_output_of_a_child_is_no_report(start: Any, do: str) -> None:
    assert start(do).report() == {"said": "all"}


def test_output_without_an_end_of_line_is_not_kept_until_there_is_one(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torchbeast.children")
    start("draw_a_bar")
    wait_for(lambda: len(caplog.messages) >= 3)
    assert caplog.messages[0] == f"the draw_a_bar: {'#' * 65_536}"


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="there are no such signals here")
def test_a_child_that_is_killed_by_a_signal_without_a_name_is_reported(start: Any) -> None:
    child = start("echo")
    child.process.send({})
    child.report()
    number = signal.SIGRTMIN + 1
    os.kill(child.process.pid, number)
    assert str(child.end()) == f"process {child.process.pid} was killed by signal {number}"


def test_a_child_that_prints_in_every_step_cannot_fill_the_disk(
    start: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_ALLOWANCE", 30_000)
    monkeypatch.setattr(child_process, "_ALLOWANCE_PER_S", 600)
    caplog.set_level(logging.INFO, "torchbeast.children")
    error = start("flood").end()
    left_out = [int(count) for count in re.findall(r"\((\d+) lines omitted", caplog.text)]
    logged = [said for said in caplog.messages if "omitted" not in said]
    assert logged[:100] == [f"the flood: {number:099}" for number in range(100)]
    assert len(logged) < 1_000 and len(logged) + sum(left_out) == 3_000
    assert f"{2_980:099}" in str(error) and f"{2_999:099}" in str(error)


def test_the_group_of_a_child_is_killed_before_its_number_may_be_another_one(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is taken until the parent has waited for the child, which is a zombie then."""
    states: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(os, "killpg", lambda pid, _: states.put(psutil.Process(pid).status()))
    child = start("crash")
    child.end()
    assert states.get(timeout=SOON) == psutil.STATUS_ZOMBIE


def test_processes_that_a_child_starts_do_not_read_its_messages(start: Any) -> None:
    child = start("share_stdin")
    child.process.send({"slot": 1})
    assert child.report() == {"eaten": "", "heard": {"slot": 1}}


def test_a_child_that_hangs_is_killed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_GRACE_S", 0.1)
    child = start("hang")
    child.report()
    end_all([child.process])
    assert child.process._process.returncode == -signal.SIGKILL
    assert child.ends.empty()


def test_a_system_without_waitid_has_children_all_the_same(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python on macOS has waitid from 3.13 on."""
    monkeypatch.delattr(os, "waitid")
    killed, hanging = start("hang"), start("hang")
    for child in (killed, hanging):
        child.report()
    killed.process.give_up("was killed")
    assert isinstance(killed.end(), ProcessDied)
    monkeypatch.setattr(child_process, "_GRACE_S", 0.1)
    end_all([hanging.process])
    assert hanging.process._process.returncode == -signal.SIGKILL


def test_all_children_that_are_ended_share_one_grace_period(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "_GRACE_S", 3.0)
    children = [start("hang") for _ in range(4)]
    for child in children:
        child.report()
    before = time.monotonic()
    end_all(child.process for child in children)
    assert time.monotonic() - before < 4 * 3.0, "four graces one after the other take longer"


def test_a_child_inherits_descriptors_and_has_its_own_environment_variables(start: Any) -> None:
    reading, writing = os.pipe()
    child = start("echo", pass_fds=(writing,), environment={"OF_THE_CHILD": "1"})
    child.process.send({})
    child.report()
    inherited = psutil.Process(child.process.pid)
    links = {os.readlink(f) for f in Path(f"/proc/{inherited.pid}/fd").iterdir()}
    assert os.readlink(f"/proc/self/fd/{writing}") in links
    assert inherited.environ()["OF_THE_CHILD"] == "1"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("of_the_user", [None, "/of/the/user"])
def test_a_child_imports_what_its_parent_can_and_leaves_pythonpath_to_the_user(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_the_user: str | None
) -> None:
    """What an environment starts, such as Blender, inherits it and may have another Python."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if of_the_user is not None:
        monkeypatch.setenv("PYTHONPATH", of_the_user)
    (tmp_path / "next_to_a_script.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    found = start("tell_path").report()
    assert found == {"module": str(tmp_path / "next_to_a_script.py"), "PYTHONPATH": of_the_user}


def test_a_child_imports_the_same_files_as_its_parent_wherever_that_was_started(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python folder/script.py` does not import from the current folder."""
    for folder in ("script", "current"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "next_to_a_script.py").touch()
    (tmp_path / "current" / "json.py").write_text("raise ImportError('not the parent has this')")
    monkeypatch.syspath_prepend(tmp_path / "script")
    monkeypatch.chdir(tmp_path / "current")
    found = start("tell_path").report()
    assert found["module"] == str(tmp_path / "script" / "next_to_a_script.py")


def test_a_child_that_leaves_signals_to_its_parent_outlives_them(start: Any) -> None:
    child = start("echo_through_signals")
    child.process.send({})
    child.report()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(child.process.pid, number)
    child.process.send({"still": "there"})
    assert child.report() == {"heard": {"still": "there"}}
    end_all([child.process])
    assert child.process._process.returncode == 0, "it ends when it is asked to"


def test_what_a_child_forks_or_starts_is_stopped_by_signals(start: Any) -> None:
    """An environment may end its own processes by SIGTERM and wait for them."""
    assert start("signal_others").report() == {
        "forked": -signal.SIGTERM,
        "started": -signal.SIGTERM,
    }


def test_ctrl_c_does_not_reach_a_child(start: Any) -> None:
    child = start("echo")
    assert os.getpgid(child.process.pid) != os.getpgid(0)
