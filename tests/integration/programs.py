# SPDX-License-Identifier: Apache-2.0
"""Starts whole programs as a user does, in a folder of the test."""

from __future__ import annotations

import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
import warm
from later import later

import torchbeast
from torchbeast.reporting.log_files import read_logs

SOON = 120.0
BUSY_S = 15.0  # that a busy machine may add to a time that docs/how-to/operations.md states
LEARNING = r"steps ([1-9][\d,]*) of "  # a line of the display after an update
COPIED = ["environments.py", "one_incarnation.py"]  # into the folder where programs are started
MARKED = "environments:Marked"
# Ends a run of MARKED once a rollout mixes two incarnations of an environment or lacks a step.
ONE_INCARNATION = ["--algo", "one_incarnation:OneIncarnation"]
PYTHON_ONLY = ("monobeast", "raybeast", "sweep")  # programs that need nothing that is compiled

# Python runs this before a program: importing anything of the compiled part then fails.
WITHOUT_COMPILED = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("libtorchbeast", "nest", "grpc"):
            raise ModuleNotFoundError(f"{name} is not installed in this test", name=name)

sys.meta_path.insert(0, Refuse())
"""


def each_program(program: str, *others: str) -> pytest.MarkDecorator:
    """Gives a test one program in every run, and others in the long tests."""
    return pytest.mark.parametrize("program", [program, *map(later, others)])


class Program:
    """A running program, whose output is read line by line and whose end has a time limit."""

    def __init__(
        self,
        name: str,
        args: list[str],
        folder: Path,
        path: list[Path],
        by: Sequence[str] = (),
        terminal: int | None = None,
        is_warm: bool = False,
    ) -> None:
        """Starts the program; path: folders that Python searches first; by: words of a command that
        becomes the program; terminal: its own one, whose output is left to others; is_warm: whether
        it may have imported torch."""
        package = Path(torchbeast.__file__).parents[1]
        if terminal is not None:
            by = ["setsid", "--ctty", *by]
        start = warm.Popen if is_warm and not by else subprocess.Popen
        self._process: subprocess.Popen[str] = start(
            [*by, sys.executable, "-m", f"torchbeast.{name}", *args],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*path, package]))},
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=subprocess.PIPE if terminal is None else terminal,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def said(self) -> str:
        """The output so far, as far as `wait_for` and `end` have read it."""
        return "".join(self._said)

    def wait_for(self, pattern: str, timeout: float = SOON) -> re.Match[str]:
        """Waits for a line that matches the pattern, however many others come before it."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                said = f"it did not say {pattern!r} within {timeout:g} s:\n{self.said}"
                raise AssertionError(said) from None
            assert line is not None, f"it ended without {pattern!r}:\n{self.said}"
            self._said.append(line)
            if match := re.search(pattern, line):
                return match

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self, timeout: float = SOON) -> int:
        """Waits for the end and the last output; returns the exit code."""
        code = self._process.wait(timeout)
        self._reader.join(timeout)
        while (line := self._lines.get_nowait()) is not None:
            self._said.append(line)
        return code

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(SOON)

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put(None)


class Workshop:
    """Starts programs, and checks what they leave behind."""

    def __init__(self, folder: Path, runtime_folder: Path, is_warm: bool = False) -> None:
        """is_warm: whether programs may have imported torch when they start."""
        self.folder = folder
        self.runtime_folder = runtime_folder
        self._is_warm = is_warm
        self._programs: list[Program] = []
        for name in COPIED:
            (folder / name).write_text(Path(__file__).with_name(name).read_text())
        self._without_compiled = folder / "without_compiled"
        self._without_compiled.mkdir()
        (self._without_compiled / "sitecustomize.py").write_text(WITHOUT_COMPILED)

    def start(
        self, name: str, *args: str, by: Sequence[str] = (), terminal: int | None = None
    ) -> Program:
        """Starts a program, with --savedir if it has it; MonoBeast finds nothing compiled.

        by, terminal: see Program.
        """
        if name not in PYTHON_ONLY:
            pytest.importorskip("libtorchbeast._C")
        where = (
            [] if name in ("polybeast_env", "status") else ["--savedir", str(self.folder / "runs")]
        )
        is_python, words = name in PYTHON_ONLY, [*args, *where]
        path = [self._without_compiled] if is_python else []
        is_warm = self._is_warm and not is_python
        self._programs.append(Program(name, words, self.folder, path, by, terminal, is_warm))
        return self._programs[-1]

    def run(self, name: str, *args: str, timeout: float = SOON) -> tuple[int, str]:
        """Runs a program that ends by itself; returns exit code and output."""
        program = self.start(name, *args)
        return program.end(timeout), program.said

    def call(self, name: str, *args: str) -> int:
        """Runs a program in the process of the test, which starts faster; returns its exit code."""
        main = importlib.import_module(f"torchbeast.{name}").main
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(sys.modules, "environments", raising=False)  # the benchmarks have one too
            patch.syspath_prepend(self.folder)
            patch.chdir(self.folder)
            code: int = main([*args, "--savedir", str(self.folder / "runs")])
        return code

    def run_folder(self, xpid: str) -> Path:
        return self.folder / "runs" / xpid

    def meta(self, xpid: str) -> dict:
        return json.loads((self.run_folder(xpid) / "meta.json").read_text())

    def saved_step(self) -> int:
        """Returns the step of the run's checkpoint."""
        saved = torch.load(self.run_folder("a") / "model.tar", weights_only=True)
        return saved["stats"]["step"]

    def last_row(self) -> dict[str, float]:
        """Returns the last row of the run's log that is complete."""
        rows = read_logs(self.run_folder("a"))
        return [row for row in rows if "optimiser_steps" in row][-1]

    def streams(self) -> dict[str, float]:
        """Returns how many streams are connected, and how often one was lost."""
        row = self.last_row()
        return {name: row[name] for name in ("live_streams", "lost_streams")}

    def servers(self) -> list[psutil.Process]:
        """Returns the environment-server processes of this test's programs, by address."""
        found = self.processes("torchbeast.servers.server_main")
        return sorted(found, key=lambda process: json.loads(process.info["cmdline"][-1])["address"])

    def actors(self) -> list[psutil.Process]:
        """Returns MonoBeast's actor processes, the oldest first."""
        found = self.processes("torchbeast.fleets.local_main")
        return sorted(found, key=lambda process: process.info["create_time"])

    def processes(self, module: str = "") -> list[psutil.Process]:
        """Returns the processes that inherited the test's own runtime folder."""
        found = []
        for process in psutil.process_iter(["cmdline", "environ", "create_time"]):
            where = (process.info["environ"] or {}).get("XDG_RUNTIME_DIR")
            words = process.info["cmdline"] or []
            ours = module in words if module else any(w.startswith("torchbeast.") for w in words)
            if ours and where == str(self.runtime_folder):
                found.append(process)
        return [process for process in found if process.pid != os.getpid()]

    def sockets(self) -> list[Path]:
        return [path for path in self.runtime_folder.rglob("*") if path.is_socket()]

    def assert_nothing_is_left(self) -> None:
        _, alive = psutil.wait_procs(self.processes(), timeout=15 + BUSY_S)
        assert alive == []
        assert list(self.runtime_folder.glob("torchbeast-*")) == []
        assert self.sockets() == []

    def close(self) -> None:
        for program in self._programs:
            program.kill()
        psutil.wait_procs(self.processes(), timeout=15 + BUSY_S)
