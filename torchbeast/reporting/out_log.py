# SPDX-License-Identifier: Apache-2.0
"""The handler of out.log, which may lose lines on a full disk and never ends a run."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from torchbeast.reporting.appended_file import AppendedFile


class OutLog(logging.Handler):
    """Appends every record to a file. Where records were lost, the next one says how many."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendedFile(path)
        self._lost = 0  # records since the last one that was written

    def emit(self, record: logging.LogRecord) -> None:
        """Appends a record, or counts it as lost; `logging` calls it under a lock."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        lost = f"({self._lost} messages could not be written here)\n" if self._lost else ""
        try:
            self._file.append(f"{lost}{line}\n")
        except OSError as error:
            self._lose(error)
        else:
            self._lost = 0

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()

    def _lose(self, error: OSError) -> None:
        self._lost += 1
        if self._lost == 1:  # not as a record, which would come here again
            print(
                f"Warning: {self._file.path} cannot be written ({error.strerror}): messages are "
                "lost there until it can; the run goes on",
                file=sys.stderr,
                flush=True,
            )
