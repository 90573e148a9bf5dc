# SPDX-License-Identifier: Apache-2.0
"""Whole runs on a disk that is full: the run's own, or the one that its output goes to."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest
import torch
from background import wait_for
from later import later
from programs import LEARNING, MARKED, ONE_INCARNATION, Program, Workshop
from test_endings import SMALL, catch

from torchbeast.reporting.log_files import read_logs

# Becomes a program whose output goes, by way of Python's buffers, to a disk without room.
UNHEARD = ["env", "-u", "PYTHONUNBUFFERED", "sh", "-c", 'exec "$0" "$@" > /dev/full 2>&1']
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
    words = ["--env", MARKED, "--xpid", "a", "--total_steps", str(10**8), "--num_workers", "2"]
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
        r"free some space there for 0.\d MB, 0.0 MB are free; the run continues"
    )
    before = step_in(folder / "model.tar")
    ballast.unlink()
    run.wait_for(r"logs.csv lost [\d,]+ rows; it is written again at step")
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


@pytest.mark.long
def test_a_run_whose_output_cannot_be_written_completes(workshop: Workshop) -> None:
    run = catch(workshop, "a", 2000, "--checkpoint_interval", "1", by=UNHEARD)
    assert run.end() == 0
    assert workshop.saved_step() == 2000 and workshop.meta("a")["successful"] is True
    log = (workshop.run_folder("a") / "out.log").read_text()
    assert "stdout cannot be written (No space left on device): output to it" in log
    assert "] Trained for 2,000 steps" in log
    workshop.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("env", "more", "code"),
    [later("environments:CannotBeMade", [], 1), ("Catch", ["--algo", "no"], 2)],
)
def test_a_run_that_fails_without_a_word_has_its_exit_code(
    workshop: Workshop, env: str, more: list[str], code: int
) -> None:
    """Python's own would be 120, because it cannot write the word at its exit either."""
    run = catch(workshop, "a", 2000, *more, env=env, by=UNHEARD)
    assert run.end() == code


@pytest.mark.long
def test_a_host_and_its_learner_whose_output_cannot_be_written_go_on(workshop: Workshop) -> None:
    """A message that cannot be printed must not count as a lost connection."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        where = f"127.0.0.1:{free.getsockname()[1]}"
    served = ["--env", "Catch", "--num_servers", "1", "--num_envs", "4", "--insecure"]
    learns = [*SMALL, "--listen", where, "--insecure", "--connect_timeout", "60", "--xpid", "a"]
    host = workshop.start("polybeast_env", *served, "--learner", where, by=UNHEARD)
    words = [*learns, "--total_steps", "400"]
    assert workshop.start("polybeast_learner", *words, by=UNHEARD).end() == 0
    assert workshop.saved_step() == 400
    assert host.end() == 0, "its learner's run has ended"
    workshop.assert_nothing_is_left()
