# SPDX-License-Identifier: Apache-2.0
"""Output that is drawn anew in its place on a terminal, and is plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TextIO, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

PanelT = TypeVar("PanelT", bound="Panel")


class Panel:
    """A display whose subclass draws or prints its figures. Used by the main thread, as a context
    manager.
    """

    def __init__(self, stream: TextIO | None, is_shown: bool = True) -> None:
        """Prepares drawing if the stream is a terminal; None: stdout.

        is_shown: False where nothing is drawn on a terminal either.
        """
        self._stream = stream or sys.stdout
        self._console = Console(file=self._stream)
        is_live = self._console.is_terminal and is_shown
        self._live = Live(console=self._console, auto_refresh=False) if is_live else None

    def __enter__(self: PanelT) -> PanelT:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _draw(self, content: RenderableType) -> bool:
        """Draws on the terminal; returns False, and does nothing, where there is none."""
        if self._live is None:
            return False
        self._live.update(content, refresh=True)
        return True

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def line_of(cells: Mapping[str, str]) -> str:
    """Returns figures with their names, in one line."""
    return "  ".join(f"{name} {value}" for name, value in cells.items())


def table_of(title: str, columns: Iterable[str]) -> Table:
    """Returns an empty table of figures."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    return table
