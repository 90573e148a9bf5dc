# SPDX-License-Identifier: Apache-2.0
"""The process of a shared replay: `python -m ...sharing.service_main '{"path": "..."}'`.

It ends when its standard input does, which only its parent holds open. Then it removes its socket,
and the folder if "removes_folder" is true.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from pathlib import Path
from typing import Any

from torchbeast.processes.child_main import (
    failure,
    follow_parent,
    take_stdin,
    take_stdout,
)
from torchbeast.processes.memory import free_memory
from torchbeast.sources.sharing.service import Service


def main(arguments: dict[str, Any]) -> int:
    """Serves until the parent ends or closes the standard input."""
    follow_parent()
    report, stdin = take_stdout(), take_stdin()
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    try:
        service = Service(Path(arguments["path"]), free_memory)
        report({"serves": arguments["path"]})
        service.run(stdin)
    except Exception as error:
        report(failure(error))
        return 1
    finally:
        if arguments["removes_folder"]:
            with contextlib.suppress(OSError):
                Path(arguments["path"]).parent.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
