# SPDX-License-Identifier: Apache-2.0
"""The main module of worker processes of a LocalFleet. Started by fleet.py, not by users.

    socket  requests (number, method, arguments) and answers (number, result), both pickled
    stdin   the process ends when it is closed, including when its parent dies
    stdout  one line of JSON if the worker cannot even be made

Each lane of the worker has a thread; methods without a lane run in the main thread. At the end,
`end` finishes the current call, in another thread, and then the main thread calls `close`.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from torchbeast.core.base.specs import find_callable
from torchbeast.errors import started
from torchbeast.fleets.child_process import SendReport, exit_now, follow_stdin, run_child
from torchbeast.fleets.fleet import returning_failures

_MAIN_LANE = ""

Request = tuple[int, str, tuple[Any, ...]]
Requests = queue.SimpleQueue[Request | None]


def main(arguments: Mapping[str, Any]) -> int:
    """Answers requests until stdin or the socket is closed; returns the exit code."""

    def answer(_: SendReport) -> None:
        worker = find_callable(arguments["worker"])(arguments["name"])
        Answering(worker, Connection(arguments["socket"])).run()
        worker.close()

    return run_child(answer)


class Answering:
    """Executes the requests that arrive at a socket."""

    def __init__(self, worker: Any, connection: Connection) -> None:
        self._worker, self._connection = worker, connection
        self._lane_of: Mapping[str, str] = getattr(worker, "LANES", {})
        lanes = {_MAIN_LANE, *self._lane_of.values()}
        self._lanes: dict[str, Requests] = {lane: queue.SimpleQueue() for lane in lanes}
        self._sending = threading.Lock()

    def run(self) -> None:
        """Answers requests until the parent is gone; called by the main thread."""
        for lane in self._lanes.keys() - {_MAIN_LANE}:
            started(threading.Thread(target=self._answer, args=(lane,), daemon=True))
        started(threading.Thread(target=self._read, daemon=True))
        follow_stdin(lambda _: None, self._close)
        self._answer(_MAIN_LANE)

    def _read(self) -> None:
        try:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    request: Request = pickle.loads(self._connection.recv_bytes())
                    self._lanes[self._lane_of.get(request[1], _MAIN_LANE)].put(request)
        finally:  # also if a request does not fit the memory
            self._close()

    def _close(self) -> None:
        """Ends the current call, and thereby the main thread."""
        self._lanes[_MAIN_LANE].put(None)
        self._worker.end()

    def _answer(self, lane: str) -> None:
        while (request := self._lanes[lane].get()) is not None:
            number, method, arguments = request
            call = returning_failures(getattr(self._worker, method))
            answer = pickle.dumps((number, call(*arguments)), protocol=5)  # frees the result
            with self._sending, contextlib.suppress(OSError):  # the parent is gone
                self._connection.send_bytes(answer)
            del request, arguments, answer


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]))
    exit_now(code)  # nothing is left to save, and torch, if loaded, takes seconds to shut down
