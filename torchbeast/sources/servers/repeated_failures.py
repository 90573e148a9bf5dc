# SPDX-License-Identifier: Apache-2.0
"""Reports of failing environments: each traceback once, or none of it."""

from __future__ import annotations

_TRACEBACK = "Traceback (most recent call last):\n"
_FRAME = '  File "'
_LONGEST_LINE = 300  # characters
_REMEMBERED = 100  # tracebacks; others are shown each time


class RepeatedFailures:
    """Replaces a traceback that was shown before by its last words and a count.

    Environments of one kind mostly fail at one place. Where two errors were raised at the same
    place they count as one, whatever their words. Used by one thread at a time.
    """

    def __init__(self) -> None:
        self._times: dict[str, int] = {}

    def shortened(self, report: str) -> str:
        """Returns the report: whole at the first time, later as one line."""
        head, found, traceback = report.partition(_TRACEBACK)
        lines = traceback.splitlines()
        place = "\n".join(line for line in lines if line.startswith(_FRAME))
        times = self._times.get(place, 0) + 1
        if not found or not place or (times == 1 and len(self._times) >= _REMEMBERED):
            return report
        self._times[place] = times
        if times == 1:
            return report
        return f"{head}{_last_words(lines)} (time {times}; the first report has its traceback)"


def _last_words(lines: list[str]) -> str:
    """Returns the first line of what the last of the tracebacks raised."""
    last_frame = max((i for i, line in enumerate(lines) if line.startswith(_FRAME)), default=0)
    return next((line for line in lines[last_frame:] if line[:1].strip()), "")


def in_one_line(report: str) -> str:
    """Returns a report in one line of at most 300 characters; of a traceback, its last words."""
    _, found, traceback = report.partition(_TRACEBACK)
    line = _last_words(traceback.splitlines()) if found else " ".join(report.split())
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 3]}..."
