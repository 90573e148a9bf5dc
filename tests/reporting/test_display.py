# SPDX-License-Identifier: Apache-2.0
"""The display of a run, and its summary."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from torchbeast.collect.contract import LostStream, TooFewStreams
from torchbeast.core.base.checks import command
from torchbeast.fleets.waiting import warn
from torchbeast.reporting.diagnosis import UNKNOWN, Diagnosis, Shares, diagnose_lost_streams
from torchbeast.reporting.display import (
    Display,
    Progress,
    Rate,
    Shown,
    clock,
    next_commands,
    summary,
)
from torchbeast.reporting.run_folder import RunFolder

BUSY = Shares(environment=0.8, inference=0.15, queueing=0.05, learning=0.38, waiting=0.62)


def shown(
    step: int,
    status: Mapping[str, float] | None = None,
    total_steps: int = 100_000,
    lost_streams: Sequence[LostStream] = (),
    shares: Shares = UNKNOWN,
    diagnosis: Diagnosis | None = None,
    row: Mapping[str, float] | None = None,
    **changes: Any,
) -> Shown:
    usual = {"step": step, "episodes": 3, "returns": deque([0.25]), "lengths": deque([12.4])}
    return Shown(
        progress=Progress(**(usual | changes)),
        row={"mean_lag": 1.5, "max_lag": 4.0} | dict(row or {}),
        total_steps=total_steps,
        status={"learner_queue_size": 2, "live_streams": 4} | dict(status or {}),
        lost_streams=lost_streams,
        shares=shares,
        diagnosis=diagnosis,
    )


def plain_lines(*each: tuple[float, Shown]) -> list[str]:
    """Returns the lines that are printed without a terminal."""
    stream = io.StringIO()
    with Display("Catch", stream) as display:
        for now, metrics in each:
            display.show(metrics, now=now)
    return stream.getvalue().splitlines()


def test_without_a_terminal_plain_lines_are_written() -> None:
    """The first update is shown at once, then every five seconds."""
    stream = io.StringIO()
    with Display("Catch", stream) as display:
        for second in range(11):
            display.show(shown(1000 * second), now=float(second))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("steps 1,000 of 100,000  steps/s 1,000  left 0:01:39  episodes 3")
    assert lines[2].startswith("steps 6,000 ")
    assert "\x1b" not in stream.getvalue()


def test_suppressed_progress_leaves_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with Display("Catch", stream, only_warnings=True) as display:
        display.show(shown(1000, lost_streams=[LostStream("here", 12.0)]), now=0.0)
        warn("nothing moves")
    assert stream.getvalue() == ""
    assert capsys.readouterr().err == "Warning: nothing moves\n"


@pytest.mark.parametrize("suppressed", [False, True])
def test_lost_streams_and_warnings_are_in_out_log_once(tmp_path: Path, suppressed: bool) -> None:
    run, lost_streams = RunFolder(tmp_path / "a", {}), [LostStream("here:50", 12.0)]
    busy = Diagnosis("environment", "learner idle")
    with Display("Catch", io.StringIO(), only_warnings=suppressed) as display:
        for now in (0, 5, 10, 15):
            lost = [] if now == 15 else lost_streams
            found = diagnose_lost_streams(lost, live=1) or busy
            display.show(shown(now + 1, lost_streams=lost, diagnosis=found), now=float(now))
        warn("nothing moves")
    run.finish(successful=True)
    logged = [line.partition("] ")[2] for line in (run.path / "out.log").read_text().splitlines()]
    assert logged == [
        "Lost 1 of 2 streams (12 s ago): here:50; reconnecting",
        "no lost streams remain; 4 are connected",
        "Warning: nothing moves",
    ]


def test_means_are_over_as_many_episodes_as_were_asked_for() -> None:
    progress = Progress()
    progress.returns.extend(range(100))
    progress.keep_last(10)
    progress.lengths.extend(range(100))
    assert progress.mean_return() == 94.5 and progress.mean_length() == 94.5
    progress.keep_last(200)
    progress.returns.extend(range(190))
    assert len(progress.returns) == 200


def test_a_resumed_run_has_as_many_episodes_in_its_means_as_before() -> None:
    progress, resumed = Progress(), Progress()
    progress.keep_last(200)
    progress.returns.extend(range(200))
    resumed.load_state_dict(progress.state_dict())
    resumed.keep_last(200)
    assert len(resumed.returns) == 200


def test_collected_steps_are_shown_until_the_first_update() -> None:
    lines = plain_lines(
        (0, shown(0)),
        (1, shown(0, {"collected_steps": 16})),
        (2, shown(0, {"collected_steps": 300})),
        (6, shown(0, {"collected_steps": 1200})),
        (7, shown(640, {"collected_steps": 1500}, row={"total_loss": 2.5})),
    )
    begins = [line.partition("  steps/s")[0] for line in lines]
    assert begins == [
        "steps 0 of 100,000",
        "steps 0 of 100,000  collected 16",
        "steps 0 of 100,000  collected 1,200",
        "steps 640 of 100,000",
    ]


def test_a_replay_is_shown_where_there_is_one() -> None:
    without, online_alone, later = plain_lines(
        (0, shown(0)),
        (5, shown(640, {"replay_fill": 0.004})),
        (10, shown(1280, {"replay_fill": 0.341}, row={"relevant_share": 0.92})),
    )
    assert "replay" not in without
    assert "queue 2  replay 0 %  streams 4" in online_alone
    assert "replay 34 %, 92 % relevant" in later


def test_a_diagnosis_is_printed_when_the_limiting_stage_changes() -> None:
    slow, fast = Diagnosis("environment", "environments"), Diagnosis("learner", "learner")
    said = [(0, None), (5, slow), (10, Diagnosis("environment", "environments, too"))]
    said += [(now, fast) for now in range(15, 80, 5)]
    lines = plain_lines(*[(now, shown(now, diagnosis=found)) for now, found in said])
    kept = [(i, line) for i, line in enumerate(lines) if not line.startswith("steps")]
    assert kept == [(2, "environments"), (9, "learner")], "at most twice a minute"


def test_no_plain_line_is_longer_than_190_columns() -> None:
    metrics = shown(
        123_456_789,
        {"learner_queue_size": 1024, "live_streams": 1000},
        total_steps=1_000_000_000,
        episodes=1_234_567,
        returns=deque([-12_345.67]),
        lengths=deque([12_345]),
        row={"total_loss": -1_234_567.89, "mean_lag": 123.4, "max_lag": 456.0},
    )
    (first, line) = plain_lines((0, shown(100_000_000)), (3600, metrics))
    assert "steps/s 6,516" in line and "lag 123.4/456" in line and len(line) <= 190
    assert "length 12  " in first and "lag 1.5/4  " in first


def test_lost_streams_are_reported_at_once_with_the_time_since() -> None:
    lost_streams = [LostStream("unix:/a.2", 11.6), LostStream("unix:/a.1", 3.0)]
    busy, loss = (
        Diagnosis("environment", "add servers"),
        diagnose_lost_streams(lost_streams, live=2),
    )
    lines = plain_lines(
        (0, shown(10, diagnosis=busy)),
        (5, shown(20, {"live_streams": 2}, lost_streams=lost_streams, diagnosis=loss)),
        (10, shown(30, {"live_streams": 2}, lost_streams=lost_streams, diagnosis=loss)),
        (15, shown(40)),
    )
    assert [line.rpartition("  streams ")[2] for line in lines if line.startswith("steps")] == [
        "4",
        "2 of 4, 2 lost, the first one 12 s ago",
        "2 of 4, 2 lost, the first one 12 s ago",
        "4",
    ]
    assert [line for line in lines if not line.startswith("steps")] == [
        "add servers",
        "Lost 2 of 4 streams (the first one 12 s ago): unix:/a.2, unix:/a.1; reconnecting",
    ]


def test_a_second_loss_is_reported_shortly_after_the_first_one() -> None:
    def lost(address: str) -> dict[str, Any]:
        lost_streams = [LostStream(address, 1.0)]
        return {
            "lost_streams": lost_streams,
            "diagnosis": diagnose_lost_streams(lost_streams, live=3),
        }

    busy = Diagnosis("environment", "add servers")
    lines = plain_lines(
        (0, shown(10, **lost("unix:/a.1"))),
        (5, shown(20, diagnosis=busy)),
        (10, shown(30, **lost("unix:/a.2"))),
    )
    said = [line for line in lines if line.startswith("Lost ")]
    assert len(said) == 2 and "unix:/a.1" in said[0] and "unix:/a.2" in said[1]


def test_losses_that_will_end_the_run_are_reported_after_those_that_will_not() -> None:
    few, many = [LostStream("a:50", 9.0)], [LostStream("a:50", 9.0, TooFewStreams(1, 2, 51.0))]
    lines = plain_lines(
        *(
            (
                time,
                shown(
                    time + 1,
                    lost_streams=lost_streams,
                    diagnosis=diagnose_lost_streams(lost_streams, live=1),
                ),
            )
            for time, lost_streams in [(0, few), (5, many), (10, many)]
        )
    )
    said = [line for line in lines if line.startswith("Lost ")]
    assert len(said) == 2 and "Giving up in 51 s" in said[1] and "Giving" not in said[0]


class Terminal(io.StringIO):
    """A terminal that keeps the frames drawn on it."""

    def isatty(self) -> bool:
        return True

    def frame(self) -> list[str]:
        """Returns the lines drawn since the last call, without control codes."""
        drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.getvalue()).replace("\r", "")
        self.seek(0)
        self.truncate()
        return [line.rstrip() for line in drawn.splitlines() if line.strip()]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in {"TERM": "xterm", "COLUMNS": "80", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    return Terminal()


@pytest.mark.parametrize(
    ("variables", "is_terminal"),
    [({"TERM": "dumb"}, True), ({"TERM": "xterm", "FORCE_COLOR": "1"}, False)],
)
def test_what_cannot_be_drawn_on_gets_plain_lines(
    variables: dict[str, str], is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if is_terminal else io.StringIO()
    with Display("Catch", stream) as display:
        display.show(shown(1000), now=0.0)
    assert "steps 1,000 of 100,000" in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_terminal_of_80_columns_shows_the_return_first_and_the_time_left(
    terminal: Terminal,
) -> None:
    found = Diagnosis("environment", "learner idle 62 %: ...")
    with Display("Catch, first", terminal) as display:
        display.show(shown(0), now=0.0)
        terminal.frame()
        display.show(shown(1000, shares=BUSY, diagnosis=found, row={"total_loss": 0.5}), now=1.0)
        lines = terminal.frame()
    assert lines[:3] == [
        "Catch, first",
        "mean return   episodes   steps/s       lag  length       loss  queue  streams",
        "       0.25          3     1,000     1.5/4      12       0.50      2        4",
    ]
    assert re.fullmatch(r"  1%  [━╺╸]+    1,000 of 100,000 steps   0:01:39 left", lines[3])
    assert lines[4:] == [
        "workers: environment 80 %, inference 15 %, queueing 5 %",
        "learner: learning 38 %, waiting 62 %",
        "learner idle 62 %: ...",
    ]


def test_the_tutorial_of_pong_shows_the_display_as_it_is_drawn(terminal: Terminal) -> None:
    page = (Path(__file__).parents[2] / "docs/tutorials/pong.md").read_text("utf-8")
    shares = Shares(environment=0.33, inference=0.67, queueing=0.0, learning=0.96, waiting=0.04)
    found = Diagnosis("none", "balanced (learner idle 4 %, workers blocked 0 %)")
    row = {"total_loss": 23.02, "mean_lag": 4.3, "max_lag": 6.0}
    status = {"learner_queue_size": 8, "live_streams": 2}
    played = {"episodes": 12, "returns": deque([-20.83]), "lengths": deque([802])}
    now = shown(26_560, status, 2_000_000, (), shares, found, row, **played)
    with Display("PongNoFrameskip-v4, pong", terminal) as display:
        display.show(shown(22_550, total_steps=2_000_000), now=0.0)
        terminal.frame()
        display.show(now, now=10.0)
        lines = terminal.frame()
    assert [line for line in [*lines[:3], *lines[4:]] if line not in page] == []


@pytest.mark.parametrize(("columns", "last"), [(60, "length"), (80, "streams"), (120, "replay")])
def test_columns_do_not_move_when_values_become_shorter(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int, last: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    long: dict[str, Any] = {"returns": deque([-12_345_678.9]), "episodes": 1_234_567}
    with Display("Catch", terminal) as display:
        display.show(shown(1_000, {"replay_fill": 0.34}, row={"total_loss": -1.0}, **long), now=0.0)
        first = terminal.frame()
        display.show(shown(99_999, {"replay_fill": 0.35}), now=1.0)
        second = terminal.frame()
    assert first[1] == second[1] and first[1].endswith(last)
    assert "-12345678.90  1,234,567" in first[2] and "0.25          3" in second[2]
    assert max(map(len, first + second)) <= columns - len("^C")
    assert first[3].index("of") == second[3].index("of")


def test_what_is_too_long_for_a_column_is_below_the_table(terminal: Terminal) -> None:
    with Display("Catch", terminal) as display:
        display.show(
            shown(10, {"live_streams": 2}, lost_streams=[LostStream("here:1", 12.0)]), now=0.0
        )
        lines = terminal.frame()
    assert lines[2].endswith("  2 of 3") and lines[4] == "streams: 2 of 3, 1 lost 12 s ago"


def test_the_last_frame_has_the_numbers_of_the_summary(terminal: Terminal) -> None:
    with Display("Catch", terminal) as display:
        learnt = {"total_loss": 1.0}
        display.show(shown(90_000, row=learnt), now=0.0)
        terminal.frame()
        known = shown(100_080, shares=BUSY, diagnosis=Diagnosis("none", "balanced"), row=learnt)
        last = dataclasses.replace(known, learnt_here=50_000, took=12.5)
        display.show(last, now=1.0)
        lines = terminal.frame()
    assert "steps/s" in lines[1] and " 4,000 " in lines[2]
    assert lines[3].startswith("100%  ━") and lines[3].endswith(
        "100,080 of 100,000 steps  in 0:00:12"
    )
    assert len(lines) == 4, "the diagnosis of the whole run follows"


@pytest.mark.parametrize(("narrow", "rows"), [(80, 4), (40, 7)])
def test_all_rows_of_the_last_frame_are_erased_after_a_resize(
    terminal: Terminal, narrow: int, rows: int
) -> None:
    """Title, names, values and progress; the last three fill two rows each at half the width."""
    with Display("Catch", terminal) as display:
        display.show(shown(10), now=0.0)
        terminal.frame()
        display._console.width = narrow
        display.show(shown(20), now=1.0)
        erased = terminal.getvalue().partition("Catch")[0]
    assert erased.count("\x1b[1A") == rows - 1


def test_the_rate_is_that_of_the_last_ten_seconds() -> None:
    rate = Rate()
    assert rate.add(0, 0.0) == 0.0
    for second in range(1, 31):
        last = rate.add(10 * second if second <= 15 else 150 + 100 * (second - 15), float(second))
    assert last == 100.0


def test_an_unknown_duration_is_shown_as_a_dash() -> None:
    assert clock(float("nan")) == clock(1e15) == "-"
    assert clock(3723) == "1:02:03"


def test_the_summary_has_steps_episodes_and_return() -> None:
    progress = Progress(step=3000)
    progress.returns.extend([1.0, 0.0])
    progress.lengths.extend([10, 14])
    assert summary(progress, 2000, 10.0) == (
        "Trained for 2,000 steps in 0:00:10 (200 steps/s), 3,000 in total.\n"
        "Mean return 0.50 and length 12 over the last 2 episodes."
    )
    assert "No episode has ended yet" in summary(Progress(), 0, 0.0)


def test_the_suggested_command_resumes_the_run_by_its_name_alone() -> None:
    text = next_commands("polybeast", Path("/runs/my run"), True)
    assert "-m torchbeast.polybeast --savedir /runs --xpid 'my run'\n" in text + "\n"
    assert "-m torchbeast.polybeast --mode test --savedir /runs --xpid 'my run'\n" in text
    assert "-m torchbeast.plot '/runs/my run'" in text


def test_the_suggested_commands_have_the_flags_that_they_need() -> None:
    kwargs = '{"size": 6}'
    text = next_commands("polybeast", Path("/a"), True, ["--env_kwargs", kwargs], ["--env", "b c"])
    assert f"--mode test --savedir / --xpid a --env_kwargs '{kwargs}'\n" in text
    assert text.endswith("--savedir / --xpid a --env 'b c'")


def test_commands_name_the_python_that_runs_as_this_terminal_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two environments may share the file to which their links point."""
    folder, other = tmp_path / ".venv" / "bin", tmp_path / "bin"
    for path in (folder, other):
        path.mkdir(parents=True)
        (path / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(other))
    assert command("plot") == f"{folder}/python -m torchbeast.plot"
    monkeypatch.chdir(tmp_path)
    assert command("plot") == ".venv/bin/python -m torchbeast.plot"
    monkeypatch.setenv("PATH", str(folder))
    assert command("plot") == "python -m torchbeast.plot"


def test_several_learners_are_resumed_by_torchrun_and_tested_without_it() -> None:
    text = next_commands("polybeast_learner", Path("/a"), True, learners=2)
    assert (
        " -m torch.distributed.run --nproc_per_node=2 -m torchbeast.polybeast_learner --sav" in text
    )
    assert f"To test:\n  {command('polybeast_learner')} --mode test" in text


def test_without_a_checkpoint_no_command_is_suggested_that_needs_one() -> None:
    text = next_commands("polybeast", Path("/runs/a"), False)
    assert "--mode test" not in text and "resume" not in text and "torchbeast.plot" in text


def test_the_rate_of_a_run_that_stands_still_is_0() -> None:
    rate = Rate()
    for second in range(31):
        rate.add(100 * second, float(second))
    assert rate.add(3000, 35.0) > 0 and rate.add(3000, 60.0) == 0


def test_the_rate_of_long_updates_is_neither_0_nor_too_high() -> None:
    rate = Rate()
    found = [rate.add(second // 16 * 1600, float(second)) for second in range(300)]
    assert min(found[32:]) > 50 and max(found) <= 100
