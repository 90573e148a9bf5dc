# SPDX-License-Identifier: Apache-2.0
"""Children that end in one way each: `python -m children '{"do": NAME}'`."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from torchbeast.envs.spec import EnvError
from torchbeast.errors import RunError, failure
from torchbeast.fleets.child_process import exit_now, follow_parent, take_stdin, take_stdout

NEVER_S = 300.0


def echo() -> None:
    """Reports every line of stdin until its end."""
    report = take_stdout()
    for line in take_stdin():
        report({"heard": json.loads(line)})


def tell_path() -> None:
    """Reports where it finds a module, and what a program that it starts would inherit."""
    module = importlib.import_module("next_to_a_script").__file__
    take_stdout()({"module": module, "PYTHONPATH": os.environ.get("PYTHONPATH")})
    take_stdin().read()


def echo_through_signals() -> None:
    """The same, but signals are left to the parent."""
    follow_parent()
    echo()


def signal_others() -> None:
    """Leaves signals to the parent, and asks a fork and a program to stop; reports how they end."""
    follow_parent()
    report = take_stdout()
    if (forked := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    words = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"]
    started = subprocess.run(words, check=False).returncode
    report({"forked": os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), "started": started})
    take_stdin().read()


def print_early() -> None:
    """Prints what is JSON too, and then reports."""
    for printed in ("0", "null", "[]", "{}", '"error"'):
        print(printed, flush=True)
    take_stdout()({"said": "all"})


def fail(error: Exception) -> None:
    report = take_stdout()
    try:
        raise error
    except Exception as raised:
        report(failure(raised))
    sys.exit(1)


def unknown_error() -> None:
    fail(KeyError("the joystick is gone"))


def known_error() -> None:
    fail(RunError("the cartridge cannot be read"))


def wrong_name() -> None:
    fail(EnvError("there is no Pnog"))


def crash() -> None:
    for number in range(30):
        print(f"line {number}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(3)


def crash_within_a_report() -> None:
    os.write(1, b'{"half": ')
    os.kill(os.getpid(), signal.SIGKILL)


def draw_a_bar() -> None:
    """Writes 200,000 characters to stderr and no end of the line."""
    sys.stderr.write("#" * 200_000)
    sys.stderr.flush()
    take_stdin().read()


def flood() -> None:
    """Writes 3,000 lines of 99 characters to stderr, and crashes."""
    for number in range(3_000):
        sys.stderr.write(f"{number:099}\n")
    sys.stderr.flush()
    os._exit(3)


def chat() -> None:
    """Prints after take_stdout, also from another process; that is no report."""
    report = take_stdout()
    print("hello from Python", flush=True)
    subprocess.run(["echo", "hello from a program"], check=True)
    report({"said": "all"})
    sys.stdin.read()


def share_stdin() -> None:
    """Starts a process that reads all of stdin first."""
    report, stdin = take_stdout(), take_stdin()
    read = subprocess.run(["cat"], capture_output=True, check=True).stdout
    report({"eaten": read.decode(), "heard": json.loads(stdin.readline())})
    stdin.read()


def leave_a_child() -> None:
    """Forks a process that holds every pipe, and dies."""
    report = take_stdout()
    if (pid := os.fork()) == 0:
        time.sleep(NEVER_S)
    report({"pid": pid})
    os._exit(3)


def end_before_a_child() -> None:
    """Forks a process that holds every pipe, and ends when it is asked to."""
    report = take_stdout()
    if (pid := os.fork()) == 0:
        time.sleep(NEVER_S)
    report({"pid": pid})
    take_stdin().read()


def outlive_parent(ends: Callable[[], None] = lambda: None) -> None:
    """Forks a process that ignores all, and ends when the parent has gone."""
    follow_parent()
    report, stdin = take_stdout(), take_stdin()
    if (pid := os.fork()) == 0:
        time.sleep(NEVER_S)
    report({"pid": pid})
    stdin.read()
    ends()


def outlive_parent_stuck() -> None:
    """The same, while a thread never ends."""
    threading.Thread(target=time.sleep, args=(NEVER_S,)).start()
    outlive_parent(lambda: exit_now(0))


def fail_at_the_end() -> None:
    """Fails when it is asked to end."""
    report = take_stdout()
    take_stdin().read()
    report(failure(RunError("the port was never freed")))


def hang() -> None:
    """Ignores the end of stdin."""
    take_stdout()({"pid": os.getpid()})
    time.sleep(NEVER_S)


if __name__ == "__main__":
    globals()[json.loads(sys.argv[1])["do"]]()
