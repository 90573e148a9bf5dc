# SPDX-License-Identifier: Apache-2.0
"""The main module of an agent of a sweep. Started by runner.py, not by users.

stdin   carries no data. When it is closed, because the agent is to stop or the sweep died, the
        agent writes a checkpoint and stops, like a program that gets SIGTERM
stdout  one line of JSON at the end: {"ended": true}, with the reason if the run failed
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from typing import Any

from torchbeast.cli.command_line import parse, run_with
from torchbeast.errors import EXIT_DONE, EXIT_FAILURE, RunError, UsageError, failure
from torchbeast.fleets.child_process import follow_stdin, take_stdout
from torchbeast.fleets.supervisor import end_program
from torchbeast.reporting.output import lossy_output
from torchbeast.sweep.agents import FLAGS
from torchbeast.sweep.config import ProgramName

GRACE_S = 120.0  # from the request to stop to the last checkpoint, which may hold a whole replay


def main(arguments: dict[str, Any]) -> int:
    """Runs the program of an agent until it ends; returns the exit code."""
    report = take_stdout()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # Ray's threads block it
    follow_stdin(lambda _: None, lambda: os.kill(os.getpid(), signal.SIGTERM), GRACE_S)
    program, words = arguments["program"], arguments["words"]
    sys.argv = [program, *words]  # recorded in meta.json
    with lossy_output(), contextlib.suppress(BrokenPipeError):  # the sweep may have been killed
        why = _run(program, words)
        report({"ended": True} if why is None else {"ended": True, "why": why})
    return EXIT_DONE if why is None else EXIT_FAILURE


def _run(program: ProgramName, words: list[str]) -> str | None:
    """Runs the program; returns why it failed, or None."""
    try:
        run = importlib.import_module(f"torchbeast.{program}").run
        run_with(parse(FLAGS[program], program, words), run)
    except Exception as error:
        if not isinstance(error, (RunError, UsageError)):
            traceback.print_exc()
        print(error, file=sys.stderr, flush=True)
        return str(failure(error)["error"])
    return None


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        end_program(main(json.loads(sys.argv[1])))
