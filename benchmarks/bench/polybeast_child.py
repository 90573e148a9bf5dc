# SPDX-License-Identifier: Apache-2.0
"""The main of a PolyBeast to be measured; started by end_to_end.py, never by a user.

It is the program itself, except that it ends when stdin is closed, as by the death of the process
that measures it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any, BinaryIO

from torchbeast import polybeast
from torchbeast.cli.command_line import parse
from torchbeast.cli.flags import PolyBeastFlags
from torchbeast.errors import failure
from torchbeast.fleets.child_process import SendReport, take_stdin, take_stdout
from torchbeast.fleets.supervisor import end_program


def main(arguments: dict[str, Any]) -> int:
    """Trains with the command line `arguments["argv"]`; returns the exit code."""
    report, stdin = take_stdout(), take_stdin()
    threading.Thread(target=_end_with, args=(stdin,), daemon=True).start()
    try:
        return polybeast.run(parse(PolyBeastFlags, polybeast.PROGRAM, arguments["argv"]))
    except Exception as error:
        _report(error, report)
        return 1


def _report(error: Exception, report: SendReport) -> None:
    """Reports the error without the run's folder, which is gone by the time it is read."""
    said = failure(error)
    report({**said, "error": said["error"].partition("\nMore is in ")[0]})


def _end_with(stdin: BinaryIO) -> None:
    while stdin.read(4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    end_program(main(json.loads(sys.argv[1])))
