# SPDX-License-Identifier: Apache-2.0
"""Two programs that learn from one replay, and what becomes of them when it or one of them dies."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from background import wait_for
from programs import Workshop

from torchbeast.collect.shared_replay import Served, serving
from torchbeast.reporting.log_files import read_logs

pytestmark = pytest.mark.long  # beside shorter tests of the same parts

SMALL = [
    *("--env", "Catch", "--num_envs", "4", "--num_workers", "1", "--batch_size", "4"),
    *("--unroll_length", "10", "--torch_threads", "1"),
    *("--replay_size", "4000", "--replay_ratio", "2"),
]
LONG = ["--total_steps", "100000000"]
SECONDS = 15.0  # until a run has noticed the end of its replay, and has ended
LATE = 60.0  # seconds, for a run to go on beside other work


def words(served: Served, xpid: str) -> list[str]:
    return [*SMALL, "--xpid", xpid, "--replay_service", served.address]


@pytest.mark.long
def test_two_runs_learn_from_one_replay(workshop: Workshop, tmp_path: Path) -> None:
    with serving(tmp_path / "s") as served:
        first = workshop.start("monobeast", *words(served, "a"), *LONG)
        first.wait_for("100 % relevant|[1-9] % relevant")
        code, said = workshop.run(
            "monobeast", *words(served, "b"), "--seed", "2", "--total_steps", "2000"
        )
        assert code == 0, said
        assert "The replay, shared with other agents, holds 4,000 steps" in said
        assert "relevant_share" in next(iter(read_logs(workshop.run_folder("b")))), "others' data"
        first.send(signal.SIGINT)
        assert first.end() == 0, first.said
        again = [*words(served, "b"), "--total_steps", "3000"]
        code, said = workshop.run("monobeast", *again)
        assert code == 0 and "Resuming" in said, said
        assert served.failure is None
    workshop.assert_nothing_is_left()


def test_a_killed_run_leaves_the_others_alone_and_a_killed_replay_ends_them(
    workshop: Workshop, tmp_path: Path
) -> None:
    with serving(tmp_path / "s") as served:
        dying = workshop.start("monobeast", *words(served, "a"), *LONG)
        living = workshop.start("monobeast", *words(served, "b"), *LONG)
        for run in (dying, living):
            run.wait_for("[1-9] % relevant|100 % relevant")
        dying.send(signal.SIGKILL)
        dying.end()
        before = len(list(read_logs(workshop.run_folder("b"))))
        logs = workshop.run_folder("b")
        wait_for(lambda: len(list(read_logs(logs))) >= before + 100, timeout=LATE)
        os.kill(served.pid, signal.SIGKILL)
        killed = time.monotonic()
        assert living.end() == 1, living.said
        assert time.monotonic() - killed < SECONDS
    assert "has ended; progress is saved in the checkpoint" in living.said
    assert "--replay_service" in living.said and "Traceback" not in living.said
    last = list(read_logs(workshop.run_folder("b")))[-1]["step"]
    saved = torch.load(workshop.run_folder("b") / "model.tar", weights_only=True)
    assert saved["stats"]["step"] == last > 0


def test_an_address_without_a_replay_is_told_at_once(workshop: Workshop, tmp_path: Path) -> None:
    nowhere = ["--replay_service", str(tmp_path / "nowhere")]
    code, said = workshop.run("monobeast", *SMALL, "--xpid", "a", *nowhere)
    assert code == 2 and "no replay is running there" in said, said
    assert "Traceback" not in said and not workshop.run_folder("a").exists()
    workshop.assert_nothing_is_left()
