# SPDX-License-Identifier: Apache-2.0
"""Learners in processes of their own: the sum, messages, and one that ends before the others."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from later import later

from torchbeast.core.update.ranks import added_in_order
from torchbeast.core.update.torch_ranks import served_store

SIZE, TIMEOUT_S = 3, 60.0
NOTICED_S = 10.0  # for the others to notice that a rank has ended


def started(case: str) -> tuple[list[subprocess.Popen[str]], Any]:
    store = served_store()
    command = [sys.executable, str(Path(__file__).with_name("one_rank.py"))]
    arguments = [[f"127.0.0.1:{store.port}", str(rank), str(SIZE), case] for rank in range(SIZE)]
    pipe = subprocess.PIPE
    return [warm.Popen([*command, *a], stdout=pipe, text=True) for a in arguments], store


def line(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize(
    ("case", "said"),
    [
        later("dies", "another learner has ended, or cannot be reached"),
        ("leaves", "another learner has ended. rank 1: its environment broke"),
    ],
)
def test_ranks_add_in_their_order_and_fail_together(case: str, said: str) -> None:
    processes, _ = started(case)
    try:
        vectors = [1e3 * torch.randn(7, generator=seeded(rank)) for rank in range(SIZE)]
        expected = added_in_order(vectors).tolist()
        assert expected != added_in_order(vectors[::-1]).tolist(), "the order shows in the bits"
        assert [line(process) for process in processes] == [expected] * SIZE
        assert [line(process) for process in processes] == [[0, 5000, 10000]] * SIZE
        if case == "dies":
            processes[1].kill()
        began = time.monotonic()
        for rank in (0, 2):
            assert said in line(processes[rank])
        assert time.monotonic() - began < NOTICED_S
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=TIMEOUT_S)


def seeded(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(rank)
