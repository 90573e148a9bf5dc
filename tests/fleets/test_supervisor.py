# SPDX-License-Identifier: Apache-2.0
"""Every end of a run: the first failure or stop counts, and everything is closed once."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from torchbeast.errors import UsageError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import uninterrupted
from torchbeast.reporting.run_folder import RunFolder

SOON = 10.0


def test_the_first_failure_is_the_one_reported() -> None:
    supervisor, second_may_fail = Supervisor(), threading.Event()

    def first() -> None:
        raise ValueError("first")

    def second() -> None:
        assert second_may_fail.wait(SOON)
        raise RuntimeError("second")

    supervisor.start_thread("a", first)
    supervisor.start_thread("b", second)
    supervisor.on_close(second_may_fail.set)
    assert supervisor.wait(SOON)
    assert supervisor.join(SOON) == []
    assert supervisor.failure is not None
    assert str(supervisor.failure) == "a: first"


@pytest.mark.parametrize(("error", "traced"), [(UsageError, False), (RuntimeError, True)])
def test_what_is_refused_by_a_sentence_leaves_no_traceback_in_the_log(
    error: type[Exception], traced: bool, tmp_path: Path
) -> None:
    def body() -> None:
        raise error("no")

    run, supervisor = RunFolder(tmp_path / "a", {}), Supervisor()
    supervisor.start_thread("a", body)
    assert supervisor.join(SOON) == []
    run.finish(successful=False)
    logged = (run.path / "out.log").read_text()
    assert "the run failed: a: no" in logged
    assert ("Traceback" in logged) == traced


def test_a_failure_after_a_stop_is_no_failure() -> None:
    supervisor, stopped = Supervisor(), threading.Event()

    def woken() -> None:
        assert stopped.wait(SOON)
        raise RuntimeError("queue closed")

    supervisor.start_thread("a", woken)
    supervisor.on_close(stopped.set)
    supervisor.stop("done")
    assert supervisor.join(SOON) == []
    assert supervisor.failure is None and supervisor.reason == "done"


def test_a_stop_after_a_failure_keeps_the_failure() -> None:
    supervisor = Supervisor()
    supervisor.fail("a", ValueError("bad"))
    supervisor.stop("done")
    assert supervisor.reason is None and supervisor.failure is not None


def test_everything_is_closed_once_in_reverse_order() -> None:
    supervisor = Supervisor()
    order: list[str] = []
    supervisor.on_close(lambda: order.append("first"))
    supervisor.on_close(lambda: order.append("second"))
    threads = [threading.Thread(target=supervisor.stop, args=(str(i),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    assert order == ["second", "first"]


def test_one_closer_that_raises_does_not_keep_the_others_from_closing() -> None:
    supervisor, closed = Supervisor(), threading.Event()

    def raises() -> None:
        raise OSError("no")

    supervisor.on_close(closed.set)
    supervisor.on_close(raises)
    supervisor.stop("done")
    assert closed.is_set()


def test_a_closer_that_is_added_after_the_end_runs_at_once() -> None:
    supervisor, closed = Supervisor(), threading.Event()
    supervisor.stop("done")
    supervisor.on_close(closed.set)
    assert closed.is_set()


def test_wait_returns_false_when_nothing_happened() -> None:
    assert Supervisor().wait(0.0) is False


def test_a_thread_that_does_not_end_is_named_and_not_waited_for() -> None:
    supervisor, release = Supervisor(), threading.Event()
    supervisor.start_thread("stuck", lambda: release.wait(SOON) and None)
    supervisor.stop("done")
    assert supervisor.join(0.05) == ["stuck"]
    release.set()
    assert supervisor.join(SOON) == []


def test_a_thread_that_the_system_refuses_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    supervisor = Supervisor()
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        supervisor.start_thread("refused", lambda: None)
    assert supervisor.join(SOON) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_without_a_failure(number: signal.Signals) -> None:
    supervisor = Supervisor()
    with supervisor.signals():
        os.kill(os.getpid(), number)
        assert supervisor.wait(SOON)
    assert supervisor.failure is None and supervisor.reason == number.name


def test_a_failure_after_a_signal_is_no_failure() -> None:
    """Whoever signals every process of a program at once may have caused it."""
    supervisor = Supervisor()
    with supervisor.signals():
        os.kill(os.getpid(), signal.SIGTERM)
        supervisor.fail("the door", RuntimeError("it was killed by SIGTERM"))
    assert supervisor.failure is None and supervisor.reason == "SIGTERM"


def test_a_signal_that_arrives_twice_at_once_counts_once() -> None:
    """`timeout` signals the process and then its group, which the process belongs to."""
    supervisor = Supervisor()
    with supervisor.signals():
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert supervisor.wait(SOON)
    assert supervisor.reason == "SIGINT"


def test_the_previous_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Supervisor().signals():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


def test_ctrl_c_waits_for_the_end_of_a_short_body_and_a_second_one_does_not() -> None:
    done = []
    for interrupts in (0, 1, 2):
        with contextlib.suppress(KeyboardInterrupt), uninterrupted(), uninterrupted():
            for _ in range(interrupts):
                signal.raise_signal(signal.SIGINT)
            done.append(interrupts)
        done.append("after" if interrupts else "not interrupted")
    assert done == [0, "not interrupted", 1, "after", "after"]
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("later", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_after_a_hang_up_is_no_second_one(
    later: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a session sends SIGHUP and then SIGTERM, which must not cost the checkpoint."""
    monkeypatch.setattr("torchbeast.fleets.supervisor.SECOND_SIGNAL_S", 0.0)
    supervisor = Supervisor()
    with supervisor.signals():
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), later)
        assert supervisor.wait(SOON)
    assert supervisor.reason == "SIGHUP"


def test_a_hang_up_that_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        supervisor = Supervisor()
        with supervisor.signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not supervisor.has_signal
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_objects_of_a_failed_thread_are_released_at_once() -> None:
    """Callers wait for a batch that the failed inference thread holds, until it is dropped."""
    dropped = threading.Event()

    class Batch:
        def __del__(self) -> None:
            dropped.set()

    def infer() -> None:
        batch = Batch()
        raise ValueError(f"NaN in {batch}")

    supervisor = Supervisor()
    supervisor.start_thread("inference", infer)
    assert dropped.wait(10)
    assert supervisor.failure is not None and supervisor.failure.origin == "inference"


def test_a_second_signal_ends_the_process_at_once_and_leaves_the_terminal_its_cursor() -> None:
    """A live display has hidden it, and does not end in order."""
    code = """
import os, signal, threading
from torchbeast.fleets import supervisor
supervisor.SECOND_SIGNAL_S = 0.0
with supervisor.Supervisor().signals():
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait()
"""
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", code], stdout=theirs, timeout=30, check=False)
    said = os.read(ours, 100) if select.select([ours], [], [], 1.0)[0] else b""
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 130 and said.endswith(b"\x1b[?25h")
