# SPDX-License-Identifier: Apache-2.0
"""A whole run on a disk that becomes full, has room again, and is full at the end."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from background import wait_for
from programs import MARKED, ONE_INCARNATION, Program, Workshop
from test_endings import LEARNING, SMALL

from torchbeast.reporting.log_files import read_logs

MOUNT = 'mount -t tmpfs -o size=4M tmpfs "$0" && exec "$@"'


def small_disk(at: Path) -> list[str]:
    """Returns the words before a command that runs it with a small disk at a path."""
    by = ["unshare", "--mount", "sh", "-c", MOUNT, str(at)]
    if shutil.which("unshare") is None or subprocess.run([*by, "true"], check=False).returncode:
        pytest.skip("only root can mount a small disk (make test-root)")
    return by


def fill(file: Path) -> None:
    with open(file, "ab", buffering=0) as ballast:
        try:
            while True:
                ballast.write(b"x" * 4096)
        except OSError as error:
            assert error.errno == errno.ENOSPC


def of_process(run: Program, path: Path) -> Path:
    """Returns a path in the run's own view of the disks, which stays when the run has ended."""
    opened = os.open(f"/proc/{run.pid}/root{path}", os.O_RDONLY | os.O_DIRECTORY)
    return Path(f"/proc/self/fd/{opened}")


def step_in(path: Path) -> int:
    return int(torch.load(path, weights_only=True)["stats"]["step"])


@pytest.mark.long
def test_a_full_disk_does_not_end_a_run_and_is_reported_at_its_end(workshop: Workshop) -> None:
    disk = workshop.folder / "runs"
    disk.mkdir()
    words = ["--env", MARKED, "--xpid", "a", "--total_steps", str(10**8), "--num_processes", "2"]
    words += [*ONE_INCARNATION, *SMALL, "--checkpoint_interval", "1"]
    run = workshop.start("monobeast", *words, by=small_disk(disk))
    run.wait_for(LEARNING)
    folder, ballast = of_process(run, disk / "a"), of_process(run, disk) / "ballast"
    wait_for(lambda: (folder / "model.tar").exists())

    fill(ballast)
    full = "No space left on device"
    run.wait_for(rf"logs.csv cannot be written \({full}\): rows are lost from step [\d,]+ on")
    run.wait_for(
        rf"no checkpoint was written to {disk}/a/model.tar \({full}\); an earlier one is intact: "
        r"make room there for 0.\d MB, 0.0 MB are free; the run goes on"
    )
    before = step_in(folder / "model.tar")
    ballast.unlink()
    run.wait_for(r"logs.csv lost [\d,]+ rows from step [\d,]+ on; it is written again at step")
    wait_for(lambda: step_in(folder / "model.tar") > before)

    fill(ballast)
    run.wait_for("no checkpoint was written")
    run.send(signal.SIGINT)
    assert run.end() == 1
    assert f"monobeast: no checkpoint was written to {disk}/a/model.tar" in run.said
    assert step_in(folder / "model.tar") > before
    steps = [row["step"] for row in read_logs(folder)]
    assert steps == sorted(set(steps)), "every row that is there is whole"
    assert len(steps) < steps[-1] / 40, "and some were lost"
    workshop.assert_nothing_is_left()
