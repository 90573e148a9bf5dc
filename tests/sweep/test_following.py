# SPDX-License-Identifier: Apache-2.0
"""Figures of an agent from the files of its run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sweeping import finish, log

from torchbeast.sweep.table import Figures, Follower, RecentReturns, is_complete

NAN = math.nan


def test_a_mean_is_over_the_last_episodes_each_with_the_same_weight() -> None:
    returns = RecentReturns(4)
    assert math.isnan(returns.mean())
    for mean, episodes in ((100.0, 2), (1.0, 1), (5.0, 3)):
        returns.add(mean, episodes)
    assert returns.mean() == (1.0 + 3 * 5.0) / 4, "the first batch is not among the last four"


def test_rows_are_read_as_they_are_written(tmp_path: Path) -> None:
    follower = Follower(tmp_path, 100)
    assert follower.read() == (0, 0, pytest.approx(NAN, nan_ok=True)), "there is no file yet"
    log(tmp_path, [(10, 0, NAN)])
    assert follower.read()[:2] == (10, 0) and math.isnan(follower.figures.mean_return)
    log(tmp_path, [(20, 2, 1.0), (30, 2, NAN), (40, 5, 6.0)])
    assert follower.read() == Figures(40, 5, (2 * 1.0 + 3 * 6.0) / 5)
    assert follower.read() == follower.figures


def test_a_row_that_is_not_whole_yet_waits(tmp_path: Path) -> None:
    log(tmp_path, [(10, 1, 1.0), (20, 2, 2.0)])
    path = tmp_path / "logs.csv"
    text = path.read_text()
    follower = Follower(tmp_path, 100)
    path.write_text(text[:-4])
    assert follower.read().step == 10
    path.write_text(text)
    assert follower.read() == Figures(20, 2, 1.5)


def test_a_damaged_line_is_left_out(tmp_path: Path) -> None:
    log(tmp_path, [(10, 1, 1.0)])
    follower = Follower(tmp_path, 100)
    with open(tmp_path / "logs.csv", "ab") as file:
        file.write(b"1," + b"0" * 200_000 + b"\n" + b'"\0\xff\n')  # too long for a cell; no text
        file.flush()
        assert follower.read() == Figures(10, 1, 1.0)
        file.write(b"1,0.0,20,2.0,2,1.0\n")
    assert follower.read() == Figures(20, 2, 1.5)


def test_damaged_names_of_columns_leave_an_agent_without_figures(tmp_path: Path) -> None:
    log(tmp_path, [(10, 1, 1.0)])
    for damage in (b"0" * 200_000, b"\xff"):
        (tmp_path / "fields.csv").write_bytes(damage)
        assert Follower(tmp_path, 100).read() == (0, 0, pytest.approx(NAN, nan_ok=True))


@pytest.mark.parametrize("more", [1, 5])
def test_rows_that_a_resumed_agent_drops_do_not_count(tmp_path: Path, more: int) -> None:
    """The file is shorter than before, or again as long."""
    log(tmp_path, [(10, 1, 1.0), (20, 2, 50.0), (30, 3, 50.0)])
    follower = Follower(tmp_path, 100)
    assert follower.read().mean_return == pytest.approx(101 / 3)
    log(tmp_path, [(20 + i, 2 + i, 3.0) for i in range(more)], resumed_at=10)
    assert follower.read() == Figures(19 + more, 1 + more, (1.0 + 3.0 * more) / (1 + more))


def test_an_agent_is_complete_once_its_run_has_ended_well(tmp_path: Path) -> None:
    figures = Figures(step=100)
    assert not is_complete(tmp_path, figures, 100), "it may have been killed before its checkpoint"
    finish(tmp_path, successful=False)
    assert not is_complete(tmp_path, figures, 100)
    finish(tmp_path)
    assert is_complete(tmp_path, figures, 100) and not is_complete(tmp_path, figures, 101)
