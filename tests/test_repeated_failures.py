# SPDX-License-Identifier: Apache-2.0
"""The traceback of an environment that fails again and again is shown once, or as a line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial

from torchbeast.errors import RepeatedFailures, in_one_line


def broken(value: float) -> None:
    raise ValueError(f"the joystick is at {value}\nwhich is outside")


def also_broken() -> None:
    try:
        broken(0.0)
    except ValueError as error:
        raise KeyError("no joystick") from error


def report(stream: int, body: Callable[[], None]) -> str:
    """Returns what the actor pool reports of an environment whose step is `body`."""
    try:
        body()
    except Exception:
        raised = traceback.format_exc()
    return f"stream {stream} gets new environments: environment server at a:1: {raised}"


def test_the_first_report_is_whole_and_later_ones_are_a_line() -> None:
    failures = RepeatedFailures()
    first = report(0, partial(broken, 0.5))
    assert failures.shortened(first) == first
    for times in (2, 3):
        assert failures.shortened(report(times, partial(broken, 1.5))) == (
            f"stream {times} gets new environments: environment server at a:1: ValueError: the "
            f"joystick is at 1.5 (an earlier report has the traceback)"
        )


def test_another_place_is_shown_whole_and_counts_by_itself() -> None:
    failures = RepeatedFailures()
    failures.shortened(report(0, partial(broken, 0.5)))
    other = report(1, also_broken)
    assert failures.shortened(other) == other
    assert "KeyError: 'no joystick' (an earlier" in failures.shortened(report(1, also_broken))


def test_a_report_without_a_traceback_stays() -> None:
    failures = RepeatedFailures()
    lost = "stream 0 is retired: environment server at a:1: no answer within 600 s"
    assert [failures.shortened(lost) for _ in range(2)] == [lost, lost]


def test_what_is_remembered_is_bounded() -> None:
    failures = RepeatedFailures()
    for number in range(1000):
        text = f'a:1: Traceback (most recent call last):\n  File "{number}.py", line 1\nError: x\n'
        assert failures.shortened(text) == text
    assert failures.shortened(text) == text
    first = text.replace('"999.py"', '"0.py"')
    assert failures.shortened(first) == ("a:1: Error: x (an earlier report has the traceback)")


def test_a_report_in_one_line_is_what_was_raised_or_all_of_it() -> None:
    assert in_one_line(report(0, partial(broken, 0.5))) == "ValueError: the joystick is at 0.5"
    assert in_one_line(report(0, also_broken)) == "KeyError: 'no joystick'"
    assert in_one_line("connection lost (Socket\nclosed)") == "connection lost (Socket closed)"
    assert in_one_line("") == ""


def test_a_report_in_one_line_is_not_a_long_one() -> None:
    long = in_one_line("OSError: " + "x" * 1000)
    assert long.startswith("OSError: xxx") and long.endswith("xxx...") and len(long) == 300
