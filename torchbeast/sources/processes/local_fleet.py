# SPDX-License-Identifier: Apache-2.0
"""Workers in processes of this machine: a fleet without Ray.

    call(then, method, ...) --> socket --> the lane's thread of the worker, see local_main.py
    then(result)            <-- socket <--

A worker ends when its fleet ends, or when the process that made it dies. A worker that ends by
itself answers every call that it has not answered yet with the reason.
"""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from torchbeast.processes.child_process import ChildProcess, end_all
from torchbeast.processes.system import environment_of_share
from torchbeast.sources.processes.fleet import Place, WorkerLost

_MAIN = "torchbeast.sources.processes.local_main"
_LAST_ANSWERS_S = 2.0  # a process that the worker left behind may keep the socket open


class Stored:
    """A value that is pickled once, however often it is sent; it arrives as the value itself."""

    def __init__(self, value: Any) -> None:
        self._bytes = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._bytes,)


class LocalWorker:
    """A handle of a worker in a child process. Any thread may use it."""

    def __init__(self, name: str, worker_class: str, cores: int) -> None:
        """Starts the process; worker_class: its "module:attribute"."""
        self.name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._error: Exception | None = None  # since it ended
        self._lock = threading.Lock()  # of the two above
        self._sending = threading.Lock()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self.process = ChildProcess(
                name,
                _MAIN,
                {"name": name, "worker": worker_class, "socket": theirs.fileno()},
                on_report=lambda report: None,
                on_end=self._end,
                pass_fds=(theirs.fileno(),),
                environment={
                    **environment_of_share(cores),
                    "PYTHONPATH": os.pathsep.join(sys.path),  # for modules beside a script
                },
            )
        self._reader = threading.Thread(target=self._read, name=f"{name}-answers", daemon=True)
        self._reader.start()

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        """Calls a method, without waiting for it; see `Worker`."""
        number = next(self._numbers)
        with self._lock:
            error = self._error
            if error is None:
                self._waiting[number] = then
        if error is not None:
            then(error)
            return
        message = pickle.dumps((number, method, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        try:
            with self._sending:
                self._connection.send_bytes(message)
        except OSError:  # it has ended: `_end` answers, with the reason
            pass

    def kill(self) -> None:
        """Ends the worker by force."""
        self.process.ask_to_end()
        self.process.give_up("was ended")
        self._end(WorkerLost("it was ended"))

    def close(self) -> None:
        """Hands over the last answers of the worker, whose process has ended."""
        self._reader.join(_LAST_ANSWERS_S)
        self._end(WorkerLost("it was ended"))
        self._connection.close()

    def _read(self) -> None:
        """Hands over answers until the process has closed its end."""
        while True:
            try:
                number, answer = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                return
            with self._lock:
                then = self._waiting.pop(number, None)
            if then is not None:
                then(answer)

    def _end(self, error: Exception) -> None:
        """Answers all calls with an error, and later ones too; the first error stays."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, {}
        for then in waiting.values():
            then(self._error)


class LocalFleet:
    """Child processes as workers. Used as a context manager, which ends them."""

    def __init__(self, worker_class: str, cores: int = 1) -> None:
        """Prepares workers.

        worker_class: "module:attribute" of what each makes with its name. cores: that each uses.
        """
        self._worker_class, self._cores = worker_class, cores
        self._workers: list[LocalWorker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def own_node(self) -> str:
        """The id of this machine; "": there are no other nodes."""
        return ""

    @property
    def host(self) -> str:
        """The address of this machine for itself."""
        return "127.0.0.1"

    def worker(self, name: str) -> LocalWorker:
        """Starts a worker."""
        worker = LocalWorker(name, self._worker_class, self._cores)
        with self._lock:
            self._workers.append(worker)
        return worker

    def put(self, value: Any) -> Stored:
        """Returns a value that may be sent to many workers."""
        return Stored(value)

    def explain(self, error: WorkerLost, place: Place | None) -> WorkerLost:
        """Returns the loss as it is: a process says why it ended by itself."""
        return error

    def end(self) -> None:
        """Ends all workers. May be called again."""
        with self._lock:
            workers, self._workers = self._workers, []
        end_all(worker.process for worker in workers)
        for worker in workers:
            worker.close()
