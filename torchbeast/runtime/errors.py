# SPDX-License-Identifier: Apache-2.0
"""How a program ends: exit codes, and the two kinds of error that are shown as one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable

EXIT_DONE = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2


class UsageError(ValueError):
    """Something the user asked for cannot be had: exit code 2. The message says what to change."""


class RunError(RuntimeError):
    """The run failed: exit code 1. The message names the origin and what happened there."""


def exit_code_of(program: str, body: Callable[[], int]) -> int:
    """Runs `body`; turns our own errors into one sentence on stderr and the exit code that says
    which kind.
    """
    try:
        return body()
    except UsageError as error:
        return _report(program, str(error), EXIT_USAGE)
    except RunError as error:
        return _report(program, str(error), EXIT_FAILURE)
    except KeyboardInterrupt:
        return _report(program, "interrupted before the run began.", 130)


def _report(program: str, message: str, code: int) -> int:
    print(f"{program}: {message}", file=sys.stderr, flush=True)
    return code
