# SPDX-License-Identifier: Apache-2.0
"""A process of an agent whose end a test decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torchbeast.fleets.child_process import ProcessDied

ENDED: set[str] = set()  # names of those that ended by themselves
SILENT: set[str] = set()  # names of those that do not report how they ended


class FakeChild:
    """A child that ends when the test says so, or is asked to."""

    made: list[FakeChild]
    ends_when_asked = False  # else when the runner waits for it

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Mapping[str, Any],
        on_report: Callable[[dict[str, Any]], None],
        on_end: Callable[[Exception], None],
        environment: Mapping[str, str],
    ) -> None:
        self.name, self.words, self.environment = name, arguments["words"], environment
        self.on_report, self.on_end = on_report, on_end
        self.times_asked = 0
        type(self).made.append(self)

    @property
    def asked(self) -> bool:
        return self.times_asked > 0

    @property
    def has_ended(self) -> bool:
        return self.name in ENDED

    def finish(self, report: dict[str, Any] | None = None) -> None:
        """Ends; report: the last one, or None if it was killed."""
        if report is not None:
            self.on_report(report)
        if not self.asked:
            self.on_end(ProcessDied("process 1 was killed by SIGKILL"))
        ENDED.add(self.name)

    def ask_to_end(self) -> None:
        self.times_asked += 1
        if self.ends_when_asked:
            self.finish({"ended": True})

    def end_by(self, deadline: float) -> None:
        if self.name in ENDED:
            return
        others = [child for child in type(self).made if child.name not in ENDED]
        assert self.asked and all(child.asked for child in others)
        if self.name not in SILENT:
            self.on_report({"ended": True})
