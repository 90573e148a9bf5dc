# SPDX-License-Identifier: Apache-2.0
"""The interface between workers elsewhere and those who use them: a source that collects from them,
or a learner whose gradients they compute.

`ray_fleet.py` implements it with Ray actors, `local_fleet.py` with processes of this machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torchbeast.processes.child_process import ProcessDied

LANES = {"load": "weights", "place": "control", "activity": "control", "end": "control"}
"""The thread of a worker that executes a method, by the method's name; without one: that of `play`.

Calls of one lane are executed in turn, those of several side by side.
"""


class WorkerLost(ProcessDied):
    """A worker is gone, or out of reach.

    has_left: with its whole node, so that nothing is wrong with the worker.
    """

    def __init__(self, message: str, has_left: bool = False) -> None:
        super().__init__(message)
        self.has_left = has_left


class Place(NamedTuple):
    """The host, process and node of a worker."""

    host: str
    pid: int
    node: str  # id


class Worker(Protocol):
    """A handle of a worker elsewhere. Beside its methods, `place` returns its Place."""

    def call(self, then: Callable[[Any], None], method: str, *arguments: Any) -> None:
        """Calls a method, without waiting for it; weights are given as [reference].

        then: called once, from any thread, with the result; with WorkerLost if the worker is
            gone, or RunError if the fleet failed. It must not block.
        """

    def kill(self) -> None:
        """Ends the worker by force, if it is still there, and never fails.

        Calls that are not answered yet end with WorkerLost.
        """


class Fleet(Protocol):
    """A place for workers. Every method may be called from any thread."""

    @property
    def own_node(self) -> str:
        """The id of the node that this process runs on; "" outside the fleet's cluster."""

    @property
    def host(self) -> str:
        """The address at which workers reach this process; UsageError where they cannot."""

    def worker(self, name: str) -> Worker:
        """Asks for a worker, which begins once there is room for it."""

    def put(self, value: Any) -> Any:
        """Stores a value for all workers, until its reference is gone; returns the reference."""

    def explain(self, error: WorkerLost, place: Place | None) -> WorkerLost:
        """Returns the loss of a worker with everything that is known of it.

        place: where it ran; None: nowhere yet.
        """
