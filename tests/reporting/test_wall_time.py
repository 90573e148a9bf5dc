# SPDX-License-Identifier: Apache-2.0
"""Times in logs go on evenly when somebody sets the clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from torchbeast.reporting.log_files import LogFiles, WallTime, read_logs


def test_times_go_on_evenly_when_the_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    true, wall = time.time(), WallTime()
    found = [wall.now()]
    for jump in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: true + jump)
        found.append(wall.now())
    assert found == sorted(found)
    assert abs(found[0] - true) < 60 and found[-1] - found[0] < 60


def test_a_resumed_log_does_not_go_back_with_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for hours, step in ((0, 10), (-24, 20)):
        now = 1e9 + 3600 * hours
        monkeypatch.setattr(time, "time", lambda now=now: now)
        files = LogFiles(tmp_path)
        files.write(step, {"loss": 1.0})
        files.close()
    first, second = (row["_time"] for row in read_logs(tmp_path))
    assert 1e9 <= first <= second < 1e9 + 60


def test_a_damaged_row_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    (tmp_path / "fields.csv").write_text("_tick,_time,step\n")
    (tmp_path / "logs.csv").write_text("# _tick,_time,step\n0,4e9,1\n1\n2,,3\n3,x,4\n\n")
    files = LogFiles(tmp_path)
    files.write(5, {})
    files.close()
    assert (tmp_path / "logs.csv").read_text().splitlines()[-1].startswith("1,4000000000.")
