# SPDX-License-Identifier: Apache-2.0
"""examples/notebook.ipynb runs as in a notebook: interrupted, gone on with, run again."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import notebook_kernel
import pytest
import warm
from later import later

import torchbeast
from torchbeast.reporting.log_files import read_logs

ROOT = Path(__file__).parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
SETTINGS, SCHEME, LEARNER, LOOP, EVALUATE, CLOSE = ("".join(cell["source"]) for cell in CODE)
UPDATE = 8 * 128


class Kernel:
    """A process that runs cells; it leads a group, which an interrupt reaches, as in Jupyter."""

    def __init__(self, folder: Path) -> None:
        words = [sys.executable, notebook_kernel.__file__]
        self.process = warm.Popen(
            words, cwd=folder, stdin=warm.PIPE, stdout=warm.PIPE, text=True, start_new_session=True
        )

    def begin(self, source: str) -> None:
        self.process.stdin.write(json.dumps(source) + "\n")
        self.process.stdin.flush()

    def end(self) -> tuple[str, list[str]]:
        """Returns how the cell ended, and the lines that it printed."""
        lines: list[str] = []
        while not (line := self.next_line()).startswith(notebook_kernel.ANSWER):
            lines.append(line)
        return line.removeprefix(notebook_kernel.ANSWER).strip(), lines

    def run(self, source: str) -> list[str]:
        self.begin(source)
        ended, lines = self.end()
        assert ended == "done", "\n".join(lines)
        return lines

    def next_line(self) -> str:
        line = self.process.stdout.readline()
        assert line, "the kernel has ended"
        return line.rstrip("\n")

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    made = Kernel(folder)
    try:
        yield made
        made.process.stdin.close()
        assert made.process.wait(30) == 0
    finally:
        made.process.kill()
        made.process.wait()
        made.process.stdout.close()


def with_settings(target_steps: int, workers: int) -> str:
    return f"{SETTINGS}\ntarget_steps, workers = {target_steps}, {workers}"


def steps_in(running: Kernel) -> int:
    return int(running.run("print(learner.steps)")[-1])


def test_there_is_nothing_of_a_run_in_the_notebook() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)


@pytest.mark.parametrize("workers", [0, later(1)])
def test_the_loop_is_interrupted_and_goes_on_and_cells_are_run_again(
    tmp_path: Path, workers: int
) -> None:
    run = tmp_path / "logs" / "notebook"
    with kernel(tmp_path) as running:
        for cell in (with_settings(10**9, workers), SCHEME, LEARNER):
            running.run(cell)
        running.begin(LOOP)
        while not running.next_line().startswith("step "):
            pass
        running.interrupt()
        assert running.end()[0] == "interrupted"
        learnt = steps_in(running)
        assert learnt >= 10 * UPDATE
        running.run("learner.step()")
        assert steps_in(running) == learnt + UPDATE, "the next step goes on"
        target = learnt + 4 * UPDATE
        for cell in (with_settings(target, workers), LEARNER):
            running.run(cell)
        assert steps_in(running) == learnt + UPDATE, "and so does a cell that is run again"
        running.run(LOOP)
        assert steps_in(running) == target
        assert running.run(EVALUATE)[-1].startswith("mean return ")
        running.run(CLOSE)
    rows = [int(row["step"]) for row in read_logs(run)]
    assert rows == list(range(UPDATE, target + 1, UPDATE)), "an update is neither lost nor doubled"
    assert torchbeast.load_checkpoint(run / "model.tar")["stats"]["step"] == target
    assert torchbeast.load_checkpoint(run / "evaluation_best.tar")["stats"]["step"] == target
