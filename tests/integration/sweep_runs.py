# SPDX-License-Identifier: Apache-2.0
"""Small agents of sweeps, and what they leave in their folders."""

from __future__ import annotations

import csv
from pathlib import Path

import torch

from torchbeast.reporting.log_files import read_logs

T, B = 10, 4
SMALL = [
    *("--num_envs", "4", "--num_workers", "1", "--batch_size", str(B)),
    *("--unroll_length", str(T), "--torch_threads", "1", "--model", "mlp", "--name", "a"),
]
REPLAY = ["--shared_replay", "--replay_size", "100000", "--env", "Catch"]


def steps(folder: Path) -> list[int]:
    """Returns the step of every row of an agent's logs."""
    has_any = (folder / "logs.csv").exists()
    return [int(row["step"]) for row in read_logs(folder)] if has_any else []


def saved_step(folder: Path) -> int:
    saved = torch.load(folder / "model.tar", weights_only=True)
    return int(saved["stats"]["step"])


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def last_row(folder: Path) -> dict[str, float]:
    return list(read_logs(folder))[-1]
