# SPDX-License-Identifier: Apache-2.0
"""The README's first command has the settings of a committed curve."""

from __future__ import annotations

import csv
import os
import shlex
import shutil
import statistics
import subprocess
from pathlib import Path

import pytest

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.flags import PolyBeastFlags

ROOT = Path(__file__).parents[1]
CURVE = ROOT / "docs" / "results" / "pong"


def words_of_make_train(*arguments: str) -> list[str]:
    """Returns the command that `make train` would run after installing, as words."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "train", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return shlex.split(done.stdout.splitlines()[-1])


def test_make_train_learns_pong_as_long_as_the_committed_curve_took_to_win() -> None:
    words = words_of_make_train()
    assert words[1:3] == ["-m", "torchbeast.polybeast"]
    flags = flatten(parse(PolyBeastFlags, "polybeast", words[3:]))
    assert flags["preset"] == "pong" and flags["env"] == "PongNoFrameskip-v4"
    rows = csv.DictReader(
        line for line in (CURVE / "polybeast-1.csv").read_text().splitlines() if line[0] != "#"
    )
    games = [(int(row["step"]), row["mean_episode_return"]) for row in rows]
    returns = [(step, float(value)) for step, value in games if value]
    assert statistics.fmean(value for _, value in returns[-20:]) > 15, "of 21"
    assert flags["total_steps"] > returns[-1][0], "the learning rate is 0 there"


def test_make_train_passes_flags_that_override_its_own() -> None:
    words = words_of_make_train("ARGS=--seed 2 --total_steps 7")
    flags = flatten(parse(PolyBeastFlags, "polybeast", words[3:]))
    assert (flags["seed"], flags["total_steps"]) == (2, 7)
