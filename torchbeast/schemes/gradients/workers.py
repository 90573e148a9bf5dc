# SPDX-License-Identifier: Apache-2.0
"""Gradient workers as the source of a learner: what it learns from are rounds of them.

    synchronous     all have collected ----------------> Round --> GatheredStep.update
    asynchronous    a contribution has arrived --------> Round --> GatheredStep.update

The workers keep their batches; a round says what they have collected. `updates.py` says what an
update does with them.
"""

from __future__ import annotations

import functools
import pickle
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from torchbeast.core.algos.optimiser_step import OptimiserStep
from torchbeast.core.algos.torch_ranks import served_store
from torchbeast.errors import RunError, UsageError
from torchbeast.processes.supervisor import Supervisor
from torchbeast.reporting.waiting import waiting_for
from torchbeast.schemes.fleet import Fleet, Place, Worker, WorkerLost
from torchbeast.schemes.gathering import Inbox, Task, Workers, gather
from torchbeast.schemes.gradients.config import GradientConfig
from torchbeast.schemes.gradients.contract import Make
from torchbeast.schemes.gradients.round import Round
from torchbeast.schemes.gradients.worker import Collected, Meeting, saved, weights_of
from torchbeast.sources.contract import WAIT_S, Away

WORKER = "torchbeast.schemes.gradients.worker:GradientWorker"
"""The class of the workers that a fleet has to make."""

_ANSWER_S = 60.0  # for one worker, which may have to end an update first
_DOING = {"start": "starting", "collect": "collecting", "step": "collecting or learning"}


def _ignore(answer: Any) -> None:
    """Does nothing with an answer."""


class GradientWorkers:
    """The workers of a run, as a source of rounds.

    Threads: `batches` and the update belong to one learner thread; another one that asks for
    batches waits for the end. When the run ends, the supervisor closes the source, which ends every
    wait. The fleet ends the workers.
    """

    yields = Round
    num_bytes = 0

    def __init__(
        self, make: Make, config: GradientConfig, centre: OptimiserStep[Any], fleet: Fleet
    ) -> None:
        """Prepares workers, which begin when the first batch is asked for.

        centre: the learner of this process, with whose state they begin. fleet: of WORKERs.
        """
        self.config, self.centre = config, centre
        self._make, self._fleet = _dumped(make), fleet
        self._names = [f"gradient worker {index}" for index in range(config.num_workers)]
        self._supervisor: Supervisor | None = None
        self._workers: list[Worker] = []
        self._places: dict[int, Any] = {}  # of the workers that have said theirs
        self._store: Any = None  # where ranks meet
        self._inbox = Inbox()
        self._one_thread = threading.Lock()
        self._round = 0
        self._doing: dict[int, tuple[str, float]] = {}  # task of a worker, and when it began
        self._latest: dict[int, Collected] = {}  # by worker
        self._parameters = [*nn.ModuleDict(centre.algo.models).parameters()]
        self._revision = 0  # counts changes of the centre's weights
        # What each worker has: a revision, and which parameters are frozen.
        self._held = [self._state] * config.num_workers
        self._stored: tuple[Any, Any] = None, None  # such a state, and the weights for workers
        self.figures: dict[str, float] = {}  # of the updates, for `status`
        self.contributions: Iterator[list[tuple[int, Any]]] = iter(())  # of asynchronous workers
        # The batch that each asynchronous worker learns from, with the figures of its minibatches.
        self.learning: dict[int, tuple[Collected, list[dict[str, float]]]] = {}

    @property
    def has_started(self) -> bool:
        """Whether the workers have begun, with the state that the centre had then."""
        return bool(self._workers)

    def start(self, supervisor: Supervisor) -> None:
        """Lets the end of the run end every wait, and a worker's failure end the run."""
        self._supervisor = supervisor
        supervisor.on_close(self.close)

    def batches(self) -> Iterator[Round]:
        """Yields rounds; ask for the next one after the update of the one before.

        Ends when a worker fails, which then is the failure of the run; raises it if `start` was not
        called.
        """
        try:
            yield from self._rounds()
        except (RunError, UsageError) as error:
            if self._supervisor is None:
                raise
            self._supervisor.fail("", error)

    def _rounds(self) -> Iterator[Round]:
        with self._one_thread:
            if self._start_workers() is None:
                return
            if self.config.is_synchronous:
                while (collected := self._collected()) is not None:
                    yield Round(collected=collected)
                return
            self.contributions = self.gather(self.next_step)
            for answers in self.contributions:
                yield Round(answers=answers)

    def close(self) -> None:
        """Ends every wait here and in the workers. May be called again."""
        self._inbox.close()
        for worker in self._workers:
            worker.call(_ignore, "end")

    def gather(
        self,
        task: Callable[[int], Task],
        fraction: float = 1.0,
        hurry: Callable[[int], None] = _ignore,
    ) -> Iterator[list[tuple[int, Any]]]:
        """Gathers answers of the workers in the configured mode; see `gathering.gather`."""
        everyone, mode = self._everyone, self.config.communication
        return gather(everyone, task, mode, fraction, inbox=self._inbox, hurry=hurry)

    def ask_all(self, task: Callable[[int], Task]) -> list[Any] | None:
        """Returns the answers of all workers to one task; None once closed."""
        found = next(gather(self._everyone, task, "synchronous", inbox=self._inbox), None)
        return None if found is None else [answer for _, answer in found]

    def ask_first(self, method: str) -> Any:
        """Returns the answer of the first worker, also after the end of the run."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._workers[0].call(answer.put, method)
        try:
            with waiting_for(self._names[0]):
                return answer.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise RunError(f"{self._names[0]} did not answer within {_ANSWER_S:g} s") from None

    def changed(self) -> None:
        """The centre's weights have changed: workers get them with their next task.

        The same is true of `requires_grad`, which nobody needs to report.
        """
        self._revision += 1

    def newer_weights(self, index: int) -> Any:
        """Returns the centre's weights for a worker that does not have them yet, else None."""
        state = self._state
        if self._held[index] == state:
            return None
        self._held[index] = state
        if self._stored[0] != state:
            self._stored = state, self._fleet.put(weights_of(self.centre, self.trained))
        return self._stored[1]

    @property
    def _state(self) -> tuple[int, tuple[bool, ...]]:
        """The revision of the centre's weights, and which parameters are frozen at present."""
        return self._revision, self.trained

    @property
    def trained(self) -> tuple[bool, ...]:
        """Which parameters of the centre are not frozen at present, by requires_grad."""
        return tuple(parameter.requires_grad for parameter in self._parameters)

    @property
    def counters(self) -> dict[str, int]:
        """The centre's counters at present; workers get them with every task, for schedules."""
        return self.centre.counters.state_dict()

    def next_step(self, index: int) -> Task:
        """Returns the next task of an asynchronous worker."""
        goes_on = index in self.learning
        return Task("step", (self.counters, self.newer_weights(index), goes_on))

    def status(self) -> Mapping[str, float]:
        """Returns the figures of the updates, and the totals of the workers' sources."""
        total: Counter[str] = Counter()
        for collected in self._latest.values():
            total.update(collected.status)
        return {**total, **self.figures}

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that the sources of all workers have spent, by stage."""
        total: Counter[str] = Counter()
        for collected in self._latest.values():
            total.update(collected.seconds)
        return dict(total)

    def hanging(self) -> str:
        """Describes workers that have been busy with one task for over WAIT_S."""
        now = time.monotonic()
        doing = sorted(dict(self._doing).items())  # a copy: answers arrive in other threads
        return "; ".join(
            f"{self._names[index]} {self._what_it_does(index, method)} for {now - since:.0f} s"
            for index, (method, since) in doing
            if now - since > WAIT_S
        )

    def _what_it_does(self, index: int, method: str) -> str:
        if index not in self._places:  # its process, or the cluster's room for it, is not there yet
            return "has not begun: it has found no room yet, or its process still starts,"
        return f"has been {_DOING.get(method, 'learning')}"

    def away(self) -> list[Away]:
        """Returns []: a worker that is lost ends the run."""
        return []

    def took(self, index: int, collected: Collected) -> None:
        """A worker has collected a batch."""
        self._latest[index] = collected

    def _start_workers(self) -> list[Any] | None:
        """Starts the workers with the centre's state; returns None if the run ended before."""
        count, meeting = self.config.num_workers, self._meeting()
        self._workers = [self._fleet.worker(name) for name in self._names]
        for index, worker in enumerate(self._workers):
            worker.call(functools.partial(self._places.__setitem__, index), "place")
        make, state = self._fleet.put(self._make), self._fleet.put(saved(self.centre))
        return self.ask_all(lambda index: Task("start", (make, index, count, meeting, state)))

    def _meeting(self) -> Meeting | None:
        """Serves the store of ranks, if there are any."""
        if not self.config.is_decentralised:
            return None
        self._store = served_store()
        # Workers that share a GPU add on the CPU: nccl refuses two ranks of one GPU.
        device = "cuda" if self.config.gpus >= 1 else "cpu"
        return Meeting(self._fleet.host, self._store.port, device)

    def _collected(self) -> list[Collected] | None:
        """Lets all workers collect a batch; None: the run has ended."""
        self._round += 1

        def task(index: int) -> Task:
            weights = None if self.config.is_decentralised else self.newer_weights(index)
            return Task("collect", (self._round, self.counters, weights))

        answers = next(self.gather(task, self.config.fraction_workers, self._stop_early), None)
        if answers is None or any(answer is None for _, answer in answers):
            return None
        for index, collected in answers:
            self.took(index, collected)
        return [collected for _, collected in answers]

    @property
    def _everyone(self) -> Workers:
        return Workers(self._names, self._call, self._explain)

    def _explain(self, index: int, error: WorkerLost) -> WorkerLost:
        place = self._places.get(index)
        return self._fleet.explain(error, place if isinstance(place, Place) else None)

    def _stop_early(self, index: int) -> None:
        least = self.config.fraction_samples
        self._workers[index].call(_ignore, "stop_early", self._round, least)

    def _call(
        self, index: int, then: Callable[[Any], None], method: str, arguments: tuple[Any, ...]
    ) -> None:
        def answered(answer: Any) -> None:
            self._doing.pop(index, None)
            then(answer)

        self._doing[index] = method, time.monotonic()
        self._workers[index].call(answered, method, *arguments)


def _dumped(make: Make) -> bytes:
    """Pickles a function, by value where cloudpickle is installed and it cannot be imported."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle.dumps(make)
    dumped: bytes = cloudpickle.dumps(make)
    return dumped
