# SPDX-License-Identifier: Apache-2.0
"""Runs a program for some time and measures its learnt steps/s."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchbeast.reporting.log_files import read_logs

HERE = Path(__file__).resolve().parent
Reading = tuple[float, float]  # time in seconds, learnt steps until then
GRACE = 20.0  # seconds for a program to end


class ProgramFailed(Exception):
    """A program ended early or did not learn; the message shows the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program to measure: how to run it and how to read its progress."""

    name: str
    command: list[str]
    environment: dict[str, str]
    output_flags: Callable[[Path], list[str]]  # flags that put its files into a folder
    readings: Callable[[Path], list[Reading]]  # read from the files in that folder


def measured(program: Program, arguments: Namespace) -> float:
    """Runs the program in a temporary folder and returns its learnt steps/s."""
    with tempfile.TemporaryDirectory(prefix="torchbeast-compared-") as name:
        folder = Path(name)
        try:
            return learnt_per_second(
                [*program.command, *program.output_flags(folder)],
                program.environment,
                folder / "output.txt",
                functools.partial(program.readings, folder),
                warm_up=arguments.warm_up,
                seconds=arguments.seconds,
                patience=arguments.patience,
            )
        except ProgramFailed as error:
            sys.exit(f"{program.name} {error}")


def add_flags(
    parser: ArgumentParser, *, warm_up: float = 5.0, seconds: float = 30.0, patience: float = 120.0
) -> None:
    """Adds the flags of a comparison of programs, with these defaults."""
    add = parser.add_argument
    add("--warm_up", type=float, default=warm_up, help="seconds before a program is measured")
    add("--seconds", type=float, default=seconds, help="length of one run")
    add("--patience", type=float, default=patience, help="seconds to wait for the first update")
    add("--repeats", type=int, default=3, help="number of rounds")
    add("--json", type=Path, help="also write the figures to this file")


def torchbeast(program: str, model: str, flags: Mapping[str, object]) -> Program:
    """Returns one of the programs on Pong with these flags; True: a flag without a value."""
    every = {"env": "PongNoFrameskip-v4", "model": model, **flags, "total_steps": 10**9}
    return Program(
        name=program,
        command=[sys.executable, "-m", f"torchbeast.{program}", "--disable_checkpoint"]
        + [f"--{key}" if value is True else f"--{key}={value}" for key, value in every.items()],
        environment={"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])},
        output_flags=lambda folder: [f"--savedir={folder}", "--xpid=run"],
        readings=_torchbeast_readings,
    )


def _torchbeast_readings(folder: Path) -> list[Reading]:
    if not (folder / "run" / "logs.csv").exists():
        return []
    return [(row["_time"], row["step"]) for row in read_logs(folder / "run")]


def learnt_per_second(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    readings: Callable[[], list[Reading]],
    *,
    warm_up: float,
    seconds: float,
    patience: float,
) -> float:
    """Runs a command and returns its steps/s over `seconds`.

    The measurement begins `warm_up` seconds after the first update, for which the program has
    `patience` seconds. Raises ProgramFailed when it ends or learns too little.
    """
    with running(command, environment, log) as program:
        began = time.monotonic()
        while not _covers(timed := after_warm_up(readings(), warm_up), seconds):
            if program.poll() is not None:
                raise ProgramFailed(f"ended with {program.returncode}:\n{tail(log)}")
            if time.monotonic() - began > patience + warm_up + seconds:
                raise ProgramFailed(f"learnt too little to be measured:\n{tail(log)}")
            time.sleep(0.2)
        return rate(timed)


def rate(timed: Sequence[Reading]) -> float:
    """Returns the steps/s from the first to the last reading."""
    (first, steps_then), (last, steps) = timed[0], timed[-1]
    return (steps - steps_then) / (last - first)


def after_warm_up(readings: Sequence[Reading], warm_up: float) -> list[Reading]:
    """Returns the readings from `warm_up` seconds after the first update on."""
    learnt = [reading for reading in readings if reading[1] > 0]
    return [reading for reading in learnt if reading[0] >= learnt[0][0] + warm_up]


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _covers(timed: Sequence[Reading], seconds: float) -> bool:
    return bool(timed) and timed[-1][0] - timed[0][0] >= seconds


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log: Path, cwd: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the command in a process group of its own, which is ended with the block."""
    with log.open("wb") as output:
        program = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield program
    finally:
        _end(program)


def _end(program: subprocess.Popen[bytes]) -> None:
    program.send_signal(signal.SIGINT)
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.wait(GRACE)
    finally:  # the children that it left behind, or the whole group
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
