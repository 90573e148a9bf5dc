# SPDX-License-Identifier: Apache-2.0
"""Runs cells of a notebook as a kernel does: in one namespace; an interrupt ends a cell alone.

Reads the source of a cell as a line of JSON, and answers with a line ANSWER and how it ended.
"""

from __future__ import annotations

import io
import json
import signal
import sys
import traceback
from typing import Any

ANSWER = "cell:"


def run(source: str, namespace: dict[str, Any]) -> str:
    """Returns "done", "interrupted" or "failed"."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        exec(compile(source, "<cell>", "exec"), namespace)
    except KeyboardInterrupt:
        return "interrupted"
    except BaseException:
        traceback.print_exc(file=sys.stdout)
        return "failed"
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return "done"


def main() -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin:
        print(ANSWER, run(json.loads(line), namespace))


if __name__ == "__main__":
    main()
