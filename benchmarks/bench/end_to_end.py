# SPDX-License-Identifier: Apache-2.0
"""Measures PolyBeast end to end: in a process of its own, between two updates, by its log.

It is started for every measurement and ended afterwards; the first updates are a warm-up.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.sample import Measure, Sample, cpu_seconds, family
from torchbeast.cli.command_line import flatten
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.errors import RunError
from torchbeast.fleets.child_process import ChildProcess, ChildReport, end_all
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.run_folder import RunConfig
from torchbeast.run.config import CheckpointConfig

_WARM_UP = 3  # updates
_POLL_S = 0.02
_TAIL = 16_384  # bytes read from the end of the log: more than a row
_FOREVER = 10**12  # --total_steps


def end_to_end(flags: PolyBeastFlags, supervisor: Supervisor) -> Measure:
    """Returns the measurement of learnt steps; `flags.run` and --total_steps are ignored."""
    return functools.partial(_measure, flags, supervisor)


def _measure(flags: PolyBeastFlags, supervisor: Supervisor, seconds: float) -> Sample:
    with tempfile.TemporaryDirectory(prefix="torchbeast-", ignore_cleanup_errors=True) as folder:
        run = RunConfig(savedir=folder, xpid="bench")
        unsaved = CheckpointConfig(disable_checkpoint=True)
        training = dataclasses.replace(flags.training, total_steps=_FOREVER)
        changed = dataclasses.replace(flags, run=run, checkpoints=unsaved, training=training)
        program = ChildProcess(
            "PolyBeast",
            "torchbeast.sweep.agent_main",
            {"program": "polybeast", "words": arguments(changed)},
            on_report=functools.partial(_fail, supervisor),
            on_end=lambda error: supervisor.fail("PolyBeast", error),
        )
        try:
            watch = _Watch(program.pid, run.folder / "logs.csv", supervisor)
            before = watch.update(_WARM_UP - 1, time.monotonic())
            after = watch.update(before.tick + 1, time.monotonic() + seconds)
            return _between(before, after)
        finally:
            end_all([program])


def _fail(supervisor: Supervisor, report: ChildReport) -> None:
    if "why" in report:
        why = report["why"].partition("\nSee ")[0]  # the folder is gone when it is read
        supervisor.fail("PolyBeast", RunError(why))


def arguments(flags: PolyBeastFlags) -> list[str]:
    """Returns a command line that parses to these flags."""
    known = {field.name: getattr(flags, field.name) for field in dataclasses.fields(PolyBeastFlags)}
    words = flatten(PolyBeastFlags(**known))
    if not flags.replay.replay_size:
        del words["replay_ratio"]  # which is refused where it is typed without a size
    return [word for name, value in words.items() for word in _words(name, value)]


def _words(name: str, value: Any) -> list[str]:
    if value is None or value == () or value == {}:
        return []
    if isinstance(value, Mapping):
        return [f"--{name}={json.dumps(value)}"]
    if isinstance(value, tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={str(value).lower() if isinstance(value, bool) else value}"]


class _Update(NamedTuple):
    """The state of the program after an update."""

    tick: int  # updates before it
    time: float
    step: int
    cpu_seconds: float = 0.0  # of the program and its servers


_NONE = _Update(-1, 0.0, 0)


class _Watch:
    """Reads a running program's log."""

    def __init__(self, pid: int, log: Path, supervisor: Supervisor) -> None:
        self._pid = pid
        self._log = log
        self._supervisor = supervisor

    def update(self, tick: int, earliest: float) -> _Update:
        """Waits for an update, at least the `tick`-th, that ends after `earliest`; returns it.

        earliest: by time.monotonic. Returns the newest update when the supervisor has ended.
        """
        seen = _newest(self._log).tick
        while True:
            newest = _newest(self._log)
            is_new = newest.tick > seen and newest.tick >= tick
            if (is_new and time.monotonic() >= earliest) or self._supervisor.wait(_POLL_S):
                return newest._replace(cpu_seconds=cpu_seconds(family(self._pid)))
            if time.monotonic() < earliest:
                seen = newest.tick


def _newest(log: Path) -> _Update:
    """Returns the last complete row; its first columns are `_tick,_time,step`."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")[:-1]
    except OSError:  # not there yet
        return _NONE
    if not lines or lines[-1].startswith(b"#"):
        return _NONE
    tick, seconds, step = lines[-1].split(b",")[:3]
    return _Update(int(tick), float(seconds), int(step))


def _between(before: _Update, after: _Update) -> Sample:
    return Sample(
        after.step - before.step, after.time - before.time, after.cpu_seconds - before.cpu_seconds
    )
