# SPDX-License-Identifier: Apache-2.0
"""logs.csv and fields.csv stay readable when columns are added, runs resume,
and runs are killed."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from torchbeast.reporting.log_files import LogFiles, LogReader, read_fields, read_logs


def write(folder: Path, *rows: tuple[int, dict[str, float]]) -> None:
    files = LogFiles(folder)
    for step, metrics in rows:
        files.write(step, metrics)
    files.close()


def test_rows_are_read_by_the_names_of_their_columns(tmp_path: Path) -> None:
    write(tmp_path, (10, {"loss": 1.5}), (20, {"loss": 0.5}))
    rows = list(read_logs(tmp_path))
    assert [(r["_tick"], r["step"], r["loss"]) for r in rows] == [(0, 10, 1.5), (1, 20, 0.5)]
    assert (tmp_path / "logs.csv").read_text().startswith("# _tick,_time,step,loss\n")


def test_a_new_column_is_added_at_the_right_and_listed(tmp_path: Path) -> None:
    write(tmp_path, (10, {"loss": 1.0}), (20, {"loss": 2.0, "lag": 3.0}))
    assert read_fields(tmp_path) == ["_tick", "_time", "step", "loss", "lag"]
    first, second = read_logs(tmp_path)
    assert "lag" not in first and second["lag"] == 3.0


def test_nan_is_an_empty_cell(tmp_path: Path) -> None:
    write(tmp_path, (10, {"mean_episode_return": float("nan"), "loss": 1.0}))
    (row,) = read_logs(tmp_path)
    assert "mean_episode_return" not in row and row["loss"] == 1.0
    assert "nan" not in (tmp_path / "logs.csv").read_text()


def test_a_resumed_run_appends_rows_and_continues_their_numbers(tmp_path: Path) -> None:
    write(tmp_path, (10, {"loss": 1.0}), (20, {"loss": 2.0}))
    write(tmp_path, (30, {"loss": 3.0}))
    assert [(r["_tick"], r["step"]) for r in read_logs(tmp_path)] == [(0, 10), (1, 20), (2, 30)]
    assert (tmp_path / "logs.csv").read_text().count("#") == 1


def test_an_incomplete_row_of_a_killed_run_does_not_affect_the_next(tmp_path: Path) -> None:
    write(tmp_path, (10, {"loss": 1.0}), (20, {"loss": 2.0}))
    logs = tmp_path / "logs.csv"
    logs.write_bytes(logs.read_bytes()[:-3])
    write(tmp_path, (30, {"loss": 3.0}))
    rows = [(r["_tick"], r["step"], r["loss"]) for r in read_logs(tmp_path)]
    assert rows == [(0, 10, 1.0), (1, 30, 3.0)]


def test_names_of_columns_that_were_cut_off_are_written_again(tmp_path: Path) -> None:
    write(tmp_path, (10, {"loss": 1.0}), (20, {"loss": 2.0, "lag": 3.0}))
    fields = tmp_path / "fields.csv"
    fields.write_bytes(fields.read_bytes()[:-3])
    write(tmp_path, (30, {"loss": 3.0, "lag": 4.0}))
    assert read_fields(tmp_path) == ["_tick", "_time", "step", "loss", "lag"]
    *_, last = read_logs(tmp_path)
    assert (last["step"], last["loss"], last["lag"]) == (30, 3.0, 4.0)


def test_a_row_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    """Its last number may lack digits."""
    write(tmp_path, (10, {"loss": 1.0}), (20, {"loss": 2.25}))
    logs = tmp_path / "logs.csv"
    logs.write_bytes(logs.read_bytes()[:-3])
    assert [row["step"] for row in read_logs(tmp_path)] == [10]


def test_rows_after_the_resumed_checkpoint_are_dropped(tmp_path: Path) -> None:
    files = LogFiles(tmp_path)
    for step in (10, 20, 30):
        files.write(step, {"loss": float(step)})
    files.close()
    files = LogFiles(tmp_path, step=20)
    files.write(25, {"loss": 1.0})
    files.close()
    assert [row["step"] for row in read_logs(tmp_path)] == [10, 20, 25]


def test_a_long_log_is_resumed_without_reading_it_at_once(tmp_path: Path) -> None:
    write(tmp_path, *((step, {"loss": 0.1}) for step in range(1, 20_001)))
    size = (tmp_path / "logs.csv").stat().st_size
    for step, last in ((20_000, 20_000), (15_000, 15_000)):
        tracemalloc.start()
        LogFiles(tmp_path, step=step).close()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < size / 5
        assert [row["step"] for row in read_logs(tmp_path)][-1] == last


def test_a_run_that_starts_again_keeps_its_earlier_log(tmp_path: Path) -> None:
    write(tmp_path, (10, {"loss": 1.0}), (20, {"loss": 1.0}))
    files = LogFiles(tmp_path, step=0)
    files.write(7, {"loss": 2.0})
    files.close()
    assert [row["step"] for row in read_logs(tmp_path)] == [7]
    LogFiles(tmp_path, step=0).close()  # that one was lost, too
    earlier = (tmp_path / "logs.earlier.csv").read_text().splitlines()
    assert earlier[0].startswith("# _tick,_time,step,loss") and len(earlier) == 3


def test_no_metric_takes_the_place_of_the_step(tmp_path: Path) -> None:
    write(tmp_path, (1000, {"step": 7, "_time": 0.0, "loss": 1.0}))
    (row,) = read_logs(tmp_path)
    assert (row["step"], row["loss"]) == (1000, 1.0) and row["_time"] > 0


@pytest.mark.parametrize("damage", [b"2," + b"0" * 200_000, b"\xff", b"1,2,x,y", b'"\0', b"# a,b"])
def test_a_damaged_row_is_left_out(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, (10, {"loss": 1.0}))
    with open(tmp_path / "logs.csv", "ab") as file:
        file.write(damage + b"\n1,0.5,20,2.0\n")
    assert [(row["step"], row["loss"]) for row in read_logs(tmp_path)] == [(10, 1.0), (20, 2.0)]


def test_rows_are_read_once_and_later_those_that_were_appended(tmp_path: Path) -> None:
    reader = LogReader(tmp_path)
    write(tmp_path, (10, {"loss": 1.0}), (20, {"loss": 2.0}))
    path = tmp_path / "logs.csv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    assert [row["step"] for row in reader.new_rows()] == [10]
    path.write_bytes(whole)
    assert [row["loss"] for row in reader.new_rows()] == [2.0]
    write(tmp_path, (30, {"loss": 3.0, "more": 4.0}))
    assert [row["more"] for row in reader.new_rows()] == [4.0], "columns that came later"
    assert list(reader.new_rows()) == []


def test_a_nan_in_a_log_of_torchbeast_2019_is_an_empty_cell(tmp_path: Path) -> None:
    rows = "# _tick,_time,step,mean_episode_return\n0,1.0,320,nan\n1,2.0,640,21.0\n"
    (tmp_path / "logs.csv").write_text(rows)
    first, second = read_logs(tmp_path)
    assert "mean_episode_return" not in first and second["mean_episode_return"] == 21.0
