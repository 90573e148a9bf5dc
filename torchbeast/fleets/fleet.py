# SPDX-License-Identifier: Apache-2.0
"""Workers elsewhere: the interface of a fleet, and the processes of this machine as one.

    call(then, method, ...) --> socket --> the lane's thread of the worker, see local_main.py
    then(result)            <-- socket <--

A source collects from workers, or a learner lets them compute gradients. `on_ray/fleet.py` is
the other fleet. The class of a worker names, in LANES, the thread that executes each method: calls
of one lane are executed in turn, those of several lanes side by side.

A local worker ends when its fleet ends, or when the process that made it dies. A worker that ends
by itself answers every call that it has not answered yet with the reason.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.child_main import failure
from torchbeast.fleets.child_process import ChildProcess, ProcessDied, end_all

_LAST_ANSWERS_S = 2.0  # a process that the worker left behind may keep the socket open


class WorkerLost(ProcessDied):
    """A worker is gone, or out of reach.

    has_left: with its whole node, so that nothing is wrong with the worker.
    """

    def __init__(self, message: str, has_left: bool = False) -> None:
        super().__init__(message)
        self.has_left = has_left


class WorkerLocation(NamedTuple):
    """The host, process and node of a worker."""

    host: str
    pid: int
    node: str  # id


class Failed(NamedTuple):
    """An exception in a worker."""

    error: str
    usage: bool  # the user can avoid it by other flags
    is_consequence: bool = False  # of the end of another worker

    @classmethod
    def by(cls, error: BaseException) -> Failed:
        """Returns the answer that stands for an exception."""
        report = failure(error)
        return cls(report["error"], report["usage"])

    def exception(self) -> Exception:
        """Returns the exception for the process that has asked."""
        return UsageError(self.error) if self.usage else RunError(self.error)


class Worker(Protocol):
    """A handle of a worker elsewhere. Its method `place` returns its WorkerLocation."""

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        """Calls a method, without waiting for it; weights are given as [reference].

        then: called once, from any thread, with the result; with ProcessDied if the worker is gone,
            or RunError if the fleet failed. It must not block.
        """

    def kill(self) -> None:
        """Ends the worker by force, if it is still there, and never fails.

        Calls that are not answered yet end with WorkerLost.
        """


class Fleet(Protocol):
    """A place for workers, which it ends. Every method may be called from any thread."""

    @property
    def shares_memory(self) -> bool:
        """Whether workers inherit descriptors of this process."""

    @property
    def own_node(self) -> str:
        """The id of the node that this process runs on; "" outside the fleet's cluster."""

    @property
    def host(self) -> str:
        """The address at which workers reach this process; UsageError where they cannot."""

    def worker(self, name: str, descriptors: Sequence[int] = ()) -> Worker:
        """Asks for a worker, which begins once there is room for it.

        descriptors: that it inherits; only where workers share memory.
        """

    def put(self, value: Any) -> Any:
        """Stores a value for all workers, until its reference is gone; returns the reference."""

    def explain(self, error: WorkerLost, place: WorkerLocation | None) -> WorkerLost:
        """Returns the loss of a worker with everything that is known of it.

        place: where it ran; None: nowhere yet.
        """


class Stored:
    """A value that is pickled once, however often it is sent; it arrives as the value itself."""

    def __init__(self, value: Any) -> None:
        self._bytes = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._bytes,)


class LocalWorker:
    """A handle of a worker in a child process. Any thread may use it."""

    def __init__(
        self,
        name: str,
        worker_class: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> None:
        """Starts the process; worker_class: its "module:attribute"."""
        self.name = name
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._error: Exception | None = None  # since it ended
        self._lock = threading.Lock()  # of the two above
        self._sending = threading.Lock()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._reader = threading.Thread(target=self._read, name=f"{name}-answers", daemon=True)
        self._reader.start()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            self.process = ChildProcess(
                name,
                "torchbeast.fleets.local_main",
                {"name": name, "worker": worker_class, "socket": theirs.fileno()},
                on_report=lambda report: None,
                on_end=self._ended,
                pass_fds=(theirs.fileno(), *descriptors),
                environment={
                    **environment,
                    "PYTHONPATH": os.pathsep.join(sys.path),  # for modules beside a script
                },
            )

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
        with self._sending, contextlib.suppress(OSError):  # it has ended: `_end` answers
            self._connection.send_bytes(message)

    def kill(self) -> None:
        """Ends the worker by force."""
        self.process.ask_to_end()
        self.process.give_up("was ended")
        self._end(WorkerLost("it was ended"))

    def close(self) -> None:
        """Hands over the last answers of the worker, whose process has ended."""
        self._ended(WorkerLost("it was ended"))

    def _read(self) -> None:
        """Hands over answers until the process has closed its end."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, answer = pickle.loads(self._connection.recv_bytes())
                with self._lock:
                    then = self._waiting.pop(number, None)
                if then is not None:
                    then(answer)
        with self._sending:
            self._connection.close()

    def _ended(self, error: Exception) -> None:
        self._reader.join(_LAST_ANSWERS_S)
        self._end(error)

    def _end(self, error: Exception) -> None:
        """Answers all calls with an error, and later ones too; the first error stays."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, {}
        for then in waiting.values():
            then(self._error)


class LocalFleet:
    """Child processes as workers. Used as a context manager, which ends them."""

    shares_memory = True
    own_node = ""  # there are no other nodes
    host = "127.0.0.1"

    def __init__(self, worker_class: str, environment: Mapping[str, str]) -> None:
        """Prepares workers.

        worker_class: "module:attribute" of what each makes with its name. environment: variables
        that each gets.
        """
        self._worker_class, self._environment = worker_class, environment
        self._workers: list[LocalWorker] = []
        self._lock = threading.Lock()

    def __enter__(self) -> LocalFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def worker(self, name: str, descriptors: Sequence[int] = ()) -> LocalWorker:
        """Starts a worker."""
        worker = LocalWorker(name, self._worker_class, self._environment, descriptors)
        with self._lock:
            self._workers.append(worker)
        return worker

    def put(self, value: Any) -> Stored:
        """Returns a value that may be sent to many workers."""
        return Stored(value)

    def explain(self, error: WorkerLost, place: WorkerLocation | None) -> WorkerLost:
        """Returns the loss as it is: a process says why it ended by itself."""
        return error

    def end(self) -> None:
        """Ends all workers. May be called again."""
        with self._lock:
            workers, self._workers = self._workers, []
        end_all(worker.process for worker in workers)
        for worker in workers:
            worker.close()
