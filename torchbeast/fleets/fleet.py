# SPDX-License-Identifier: Apache-2.0
"""Fleets of workers: the interface, and a fleet of processes on this machine.

    call(then, method, ...) --> socket --> the lane's thread of the worker, see local_main.py
    then(result)            <-- socket <--

A source collects from workers, or a learner lets them compute gradients. The other fleet is in
`on_ray/fleet.py`. The class of a worker assigns methods to threads, in LANES: calls in one lane are
executed one after the other, calls in different lanes concurrently.

A local worker ends when its fleet ends, or when the process that made it dies. If a worker ends for
another reason, all of its open calls are answered with that reason.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from torchbeast.errors import error_of, failure, started
from torchbeast.fleets.child_process import ChildProcess, ProcessDied, end_all
from torchbeast.fleets.system import uninterrupted

P = ParamSpec("P")
T = TypeVar("T")

_LAST_ANSWERS_S = 2.0  # processes that the worker left behind may keep the socket open


class WorkerLost(ProcessDied):
    """A worker is gone, or out of reach.

    has_left: its whole node is gone, so the worker itself did nothing wrong.
    """

    def __init__(self, message: str, has_left: bool = False) -> None:
        super().__init__(message)
        self.has_left = has_left


class WorkerLocation(NamedTuple):
    """The host, process and node of a worker."""

    host: str
    pid: int
    node: str  # id


def error_in(
    answer: Any, explain: Callable[[WorkerLost], WorkerLost] = lambda error: error
) -> Exception | None:
    """Returns the error that is the answer to a call, or None if the call succeeded.

    explain: returns the error about a lost worker, with everything that is known about it.
    """
    if isinstance(answer, WorkerLost):
        return explain(answer)
    return answer if isinstance(answer, Exception) else None


def returning_failures(method: Callable[P, T]) -> Callable[P, T | Exception]:
    """Makes a worker's method return a UsageError or RunError instead of raising an exception."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | Exception:
        try:
            return method(*args, **kwargs)
        except (Exception, SystemExit) as error:  # user code may call sys.exit
            return error_of(failure(error))

    return call


class Worker(Protocol):
    """A handle of a worker. The worker's method `place` returns its WorkerLocation."""

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        """Calls a method without waiting for it. Pass stored values as [reference].

        then: called once, in any thread, with the result, or with an error, see `error_in`:
            ProcessDied if the worker is gone, else UsageError or RunError. It must not block.
        """

    def kill(self) -> None:
        """Kills the worker if it still exists; never raises.

        Open calls are answered with WorkerLost.
        """


class FleetWorker:
    """The base class of workers, in their processes. _closing: what `close` has to end."""

    def __init__(self, name: str) -> None:
        self._name, self._closing = name, contextlib.ExitStack()

    def __repr__(self) -> str:
        return self._name  # Ray puts it before every line that the worker prints

    def place(self) -> WorkerLocation:
        """Returns the host and process of the worker."""
        return WorkerLocation(socket.gethostname(), os.getpid(), "")

    def close(self) -> None:
        """Closes what the worker has opened."""
        self._closing.close()


class Fleet(Protocol):
    """Starts workers, and ends them. Any thread may call any method."""

    @property
    def shares_memory(self) -> bool:
        """Whether workers can inherit file descriptors of this process."""

    @property
    def own_node(self) -> str:
        """The ID of the node on which this process runs; "" outside the fleet's cluster."""

    @property
    def host(self) -> str:
        """The address at which workers reach this process; raises UsageError if they cannot."""

    def worker(self, name: str, descriptors: Sequence[int] = ()) -> Worker:
        """Requests a worker, which starts when there is room for it.

        descriptors: to inherit; only if workers share memory.
        """

    def put(self, value: Any) -> Any:
        """Stores a value for all workers while the returned reference exists."""

    def explain(self, error: WorkerLost, place: WorkerLocation | None) -> WorkerLost:
        """Returns the error about a lost worker, with everything that is known about it.

        place: where it ran; None: it had not started.
        """


class Stored:
    """A value that is pickled only once, even if it is sent often. The value itself arrives."""

    def __init__(self, value: Any) -> None:
        self._bytes = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self._bytes,)


class LocalWorker:
    """A handle of a worker in a child process, for any thread."""

    def __init__(
        self,
        name: str,
        worker_class: str,
        environment: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> None:
        """Starts the process; worker_class: its "module:attribute"."""
        self._numbers = itertools.count()
        self._waiting: dict[int, Callable[[Any], None]] = {}
        self._error: Exception | None = None  # why it has ended
        self._lock = threading.Lock()  # protects the two above
        self._sending = threading.Lock()
        self._connection, theirs = Pipe()
        self._reader = threading.Thread(target=self._read, name=f"{name}-answers", daemon=True)
        started(self._reader)
        with theirs:
            self.process = ChildProcess(
                name,
                "torchbeast.fleets.local_main",
                {"name": name, "worker": worker_class, "socket": theirs.fileno()},
                on_report=lambda report: None,
                on_end=self.ended,
                pass_fds=(theirs.fileno(), *descriptors),
                environment=environment,
            )

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        """Calls a method without waiting for it; see `Worker`."""
        number = next(self._numbers)
        with self._lock:
            self._waiting[number] = then
        if self._error is not None:
            self._end(self._error)
            return
        message = pickle.dumps((number, method, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        with uninterrupted(), self._sending, contextlib.suppress(OSError):
            self._connection.send_bytes(message)  # if the worker has ended, `_end` answers

    def kill(self) -> None:
        """Kills the worker."""
        self.process.ask_to_end()
        self.process.give_up("was ended")
        self._end(WorkerLost("it was ended"))

    def _read(self) -> None:
        """Delivers answers until the process has closed its end of the socket."""
        try:
            while True:
                number, answer = pickle.loads(self._connection.recv_bytes())
                with self._lock:
                    then = self._waiting.pop(number, None)
                if then is not None:
                    then(answer)
        except (EOFError, OSError):
            pass
        except Exception as error:  # an answer of a class that is not here
            self._end(error)
        with self._sending:
            self._connection.close()

    def ended(self, error: Exception) -> None:
        """Delivers the last answers of the worker, whose process has ended with this error."""
        self._reader.join(_LAST_ANSWERS_S)
        self._end(error)

    def _end(self, error: Exception) -> None:
        """Answers all open and later calls with this error, unless there was one before."""
        with self._lock:
            self._error = self._error or error
            waiting, self._waiting = self._waiting, {}
        for then in waiting.values():
            then(self._error)


class LocalFleet(contextlib.AbstractContextManager["LocalFleet"]):
    """A fleet of child processes. A context manager, which ends them."""

    shares_memory = True
    own_node = ""  # because there are no other nodes
    host = "127.0.0.1"

    def __init__(self, worker_class: str, environment: Mapping[str, str]) -> None:
        """Prepares workers.

        worker_class: "module:attribute" of the class, called with the worker's name. environment:
        additional environment variables of the workers.
        """
        self._worker_class, self._environment = worker_class, environment
        self._workers: list[LocalWorker] = []
        self._lock = threading.Lock()

    def __exit__(self, *_: object) -> None:
        self.end()

    def worker(self, name: str, descriptors: Sequence[int] = ()) -> LocalWorker:
        """Starts a worker."""
        worker = LocalWorker(name, self._worker_class, self._environment, descriptors)
        with self._lock:
            self._workers.append(worker)
        return worker

    def put(self, value: Any) -> Stored:
        """Returns a value that can be sent to many workers."""
        return Stored(value)

    def explain(self, error: WorkerLost, place: WorkerLocation | None) -> WorkerLost:
        """Returns the error unchanged, because it already says why the process ended."""
        return error

    def end(self) -> None:
        """Ends all workers. May be called again."""
        with self._lock:
            workers, self._workers = self._workers, []
        end_all(worker.process for worker in workers)
        for worker in workers:
            worker.ended(WorkerLost("it was ended"))
