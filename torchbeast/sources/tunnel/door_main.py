# SPDX-License-Identifier: Apache-2.0
"""The main module of the door's process; started by door_process.py, never by a user.

A process of its own, because relaying must not wait for the interpreter lock of the learner. It
runs until its stdin is closed, which also happens when the learner dies in any way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchbeast.processes.child_main import Report, failure, follow_parent, take_stdout
from torchbeast.processes.descriptors import allow_descriptors
from torchbeast.sources.servers.config import ServerSecurityConfig
from torchbeast.sources.servers.listening import listeners
from torchbeast.sources.tunnel import tls
from torchbeast.sources.tunnel.door import Door

_FAREWELL_S = 0.5  # for hosts to be told that the learner has ended


def main(arguments: dict[str, Any]) -> int:
    """Runs the door of `arguments`; returns the exit code."""
    follow_parent()
    report = take_stdout()
    allow_descriptors()  # each relayed connection takes two
    try:
        asyncio.run(_run(arguments, report))
    except Exception as error:
        report(failure(error))
        return 1
    finally:
        shutil.rmtree(arguments["folder"], ignore_errors=True)
    return 0


async def _run(arguments: dict[str, Any], report: Report) -> None:
    """Opens the door until stdin ends; raises whatever keeps it from admitting hosts."""
    listening, door = _open(arguments, report)
    accepting: asyncio.Future[Any] = asyncio.gather(*map(door.accept, listening))
    report({"ready": True})
    ending: asyncio.Future[Any] = asyncio.ensure_future(_end_of_stdin(door))
    try:
        await asyncio.wait({accepting, ending}, return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await accepting
        has_ended = await ending
        for listener in listening:
            listener.close()  # hosts that are told of the end dial again at once
        if has_ended:
            door.say_ended()
            await asyncio.sleep(_FAREWELL_S)
    finally:
        door.close()


def _open(arguments: dict[str, Any], report: Report) -> tuple[list[socket.socket], Door]:
    """Makes the door; raises UsageError for unusable files and addresses."""
    from torchbeast.sources.servers.credentials import read_token, server_credentials

    files = ServerSecurityConfig(**arguments["security"])
    server_credentials(files)  # says what is wrong with them
    token = "" if files.token_file is None else read_token(files.token_file)
    door = Door(
        Path(arguments["folder"]),
        tls.of_door(files),
        token,
        lambda visit: report({"visit": dataclasses.asdict(visit)}),
    )
    return listeners(arguments["listen"]), door


async def _end_of_stdin(door: Door) -> bool:
    """Tells hosts what the learner tells them, until stdin is closed; returns whether the learner
    said before that it has ended.
    """
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes] = asyncio.Queue()
    threading.Thread(target=_read_stdin, args=(loop, lines.put_nowait), daemon=True).start()
    while line := await lines.get():
        message = json.loads(line)
        if "ended" in message:
            return True
        door.tell(message["tell"], message["sentence"])
    return False


def _read_stdin(loop: asyncio.AbstractEventLoop, on_line: Callable[[bytes], None]) -> None:
    """Hands over each line, and b"" at the end."""
    with contextlib.suppress(RuntimeError), os.fdopen(0, "rb") as stdin:  # the loop has ended
        for line in itertools.chain(stdin, [b""]):
            loop.call_soon_threadsafe(on_line, line)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
