# SPDX-License-Identifier: Apache-2.0
"""Gradient workers, combined into the source and the update of a training loop.

    Centralised     each minibatch: gradients of all --> the centre's step --> weights to all
    Asynchronous    gradients of one --> the centre's step --> weights to that one
    Decentralised   the workers all-reduce their gradients, and each takes the step

The workers keep their batches; a JointBatch describes what they have collected. `env_steps` counts
steps of all workers, and `version` counts updates: rounds in which all workers took part, or, with
asynchronous workers, batches of single workers.
"""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from torchbeast.collect import joint
from torchbeast.collect.contract import LostStream
from torchbeast.collect.weights import packed
from torchbeast.core.update.minibatch import means
from torchbeast.core.update.optimiser_step import NonFiniteError, OptimiserStep, UpdateResult
from torchbeast.core.update.ranks import Contribution
from torchbeast.core.update.torch_ranks import RankGone, served_store
from torchbeast.errors import RunError, UsageError
from torchbeast.fleets.fleet import Fleet, Worker, WorkerLocation, WorkerLost, error_in
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.waiting import WAIT_S, running_time, waiting_for
from torchbeast.gradients.config import GradientConfig
from torchbeast.gradients.worker import Make, Meeting, as_tensor

WORKER = "torchbeast.gradients.worker:GradientWorker"
"""The class of the workers that a fleet has to make."""

Task = tuple[Any, ...]
"""The name of a method for a worker to execute, and its arguments."""

Answer = TypeVar("Answer")

_ANSWER_S = 60.0  # for all workers together
_DOING = {"start": "starting", "collect": "collecting", "step": "collecting or training"}


class GradientWorkers(joint.JointLearner):
    """The gradient workers of a run.

    Threads: one learner thread uses `batches` and updates; other threads that ask for batches wait
    until the end. When the run ends, the supervisor closes the source, which ends every wait. The
    fleet ends the workers.
    """

    num_bytes = 0

    def __init__(
        self, make: Make, config: GradientConfig, centre: OptimiserStep[Any], fleet: Fleet
    ) -> None:
        """Prepares workers. They start with the first batch.

        centre: the learner of this process, whose state the workers get at the start. With
        centralised updates it applies the gradients; with decentralised updates it only holds the
        state to save. fleet: makes WORKERs.
        """
        super().__init__(centre)
        self._config, self._make, self._fleet = config, _dumped(make), fleet
        self._names = [f"gradient worker {index}" for index in range(config.num_workers)]
        self._supervisor: Supervisor | None = None
        self._workers: list[Worker] = []  # empty until they are started
        self._are_started = False
        self._places: dict[int, Any] = {}  # of the workers that have reported theirs
        self._gathering = Gathering(self._names, self._workers, self._explain)
        self._one_thread = threading.Lock()
        self._round = 0
        self._revision = 0  # counts changes of the centre's weights
        self._latest: dict[int, joint.BatchReport] = {}  # by worker
        self._parameters = [*nn.ModuleDict(centre.algo.models).parameters()]

    def start(self, supervisor: Supervisor) -> None:
        """Lets the end of the run end all waits, and a worker's failure end the run."""
        self._supervisor = supervisor
        supervisor.on_close(self.close)

    def batches(self) -> Iterator[joint.JointBatch]:
        """Yields the batches of rounds. Update before you ask for the next one.

        If an exception from outside ends an iterator or an update, another iterator can continue.
        If a worker fails, the iterator ends and the run fails; without `start`, it raises the
        failure.
        """
        try:
            with self._one_thread:
                if self._start_workers():
                    self._revision += 1  # an interrupt may have kept weights from some workers
                    yield from self._rounds()
        except (RunError, UsageError, NonFiniteError) as error:
            if self._supervisor is None:
                raise
            self._supervisor.fail("", error)

    def close(self) -> None:
        """Ends all waits, here and in the workers. May be called again."""
        self._gathering.close()
        for worker in self._workers:
            worker.call(lambda answer: None, "end")

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Raises UsageError: the environments belong to the gradient workers."""
        raise UsageError(
            "gradient workers do not support options for environments: use a scheme without "
            "grad_remote_workers"
        )

    def status(self) -> Mapping[str, float]:
        """Returns the totals of the workers' sources."""
        return joint.total(report.status for report in self._latest.values())

    def seconds(self) -> dict[str, float]:
        """Returns the seconds that the sources of all workers have spent, by stage."""
        return joint.total(report.seconds for report in self._latest.values())

    def hanging(self) -> str:
        """Describes workers that have been busy with one task for over WAIT_S."""
        now = running_time()
        doing = sorted(dict(self._gathering.doing).items())  # a copy: other threads change it
        return "; ".join(
            f"{self._names[index]} {self._what_it_does(index, method)} for {now - since:.0f} s"
            for index, (method, since) in doing
            if now - since > WAIT_S
        )

    def _what_it_does(self, index: int, method: str) -> str:
        if index not in self._places:  # its process does not run yet
            return "has been starting (still loading, or without free resources)"
        if method == "step" and self._config.is_synchronous:
            return "has been training"
        return f"has been {_DOING.get(method, 'training')}"

    def lost_streams(self) -> list[LostStream]:
        """Returns [], because a lost worker ends the run."""
        return []

    # --- the rounds

    def _rounds(self) -> Iterator[joint.JointBatch]:
        """Repeatedly lets each worker collect a batch."""
        while True:
            fraction = self._config.fraction_workers
            reports = self._gathering.all(self._collecting, fraction, self._stop_early)
            if reports is None:
                return
            self._round += 1
            self._latest = dict(enumerate(reports))
            yield joint.JointBatch(reports)

    def _collecting(self, index: int) -> Task:
        return "collect", self._round, self.counters.state_dict(), self._newer_weights(index)

    def _stop_early(self, index: int) -> None:
        least = self._config.fraction_samples
        self._workers[index].call(lambda answer: None, "stop_early", self._round, least)

    def _newer_weights(self, index: int) -> Any:
        """Returns the centre's weights for a worker that does not have them yet, else None."""
        return None

    def _trained(self) -> tuple[bool, ...]:
        """Returns requires_grad of the centre's parameters."""
        return tuple(parameter.requires_grad for parameter in self._parameters)

    # --- the workers

    def _start_workers(self) -> bool:
        """Starts the workers with the centre's state; returns False if the run ends before that."""
        if self._are_started:
            return True
        while (index := len(self._workers)) < self._config.num_workers:
            self._workers.append(self._fleet.worker(self._names[index]))
            placed = functools.partial(self._places.__setitem__, index)
            self._workers[index].call(placed, "place")
        count, meeting = self._config.num_workers, self._meeting()
        make, state = self._fleet.put(self._make), self._fleet.put(joint.saved_state(self._step))

        def start(index: int) -> Task:
            return "start", make, index, count, meeting, state

        self._are_started = self._gathering.all(start) is not None
        return self._are_started

    def _meeting(self) -> Meeting | None:
        """Returns where the workers meet as ranks, or None if they do not."""
        return None

    def _asked(self, task: Callable[[int], Task]) -> list[Any]:
        """Returns the answers of all workers to one task; raises RunError if the run ends before
        that.
        """
        return _needed(self._gathering.all(task))

    def _explain(self, index: int, error: WorkerLost) -> WorkerLost:
        place = self._places.get(index)
        return self._fleet.explain(error, place if isinstance(place, WorkerLocation) else None)


class Centralised(GradientWorkers):
    """Synchronous gradients that the centre applies."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # The state of each worker: a revision, and which parameters are frozen.
        self._held = [self._state()] * self._config.num_workers
        self._stored: tuple[Any, Any] = None, None  # such a state, and its stored weights

    def update(self, batch: joint.JointBatch) -> UpdateResult:
        """Takes one step per minibatch, with the gradients of all workers."""
        centre, learnt, of_batches = self._step, [], []
        with centre.restored_on_error():
            self._observe(batch.reports)
            for contributed in self._contributions():
                of_batches += [each.message["batch_metrics"] for each in contributed]
                learnt.append(self._apply(contributed))
                if learnt[-1] and centre.algo.stops_after(learnt[-1]):
                    break
        return UpdateResult(means(learnt) | means(of_batches) | centre.count(batch.env_steps))

    def _contributions(self) -> Iterator[list[Contribution]]:
        """Yields the contributions of all workers, for one optimiser step after the other."""

        def task(index: int) -> Task:
            return "step", self.counters.state_dict(), self._newer_weights(index), True

        while any(answers := [contributed for _, contributed in self._asked(task)]):
            if not all(answers):
                ended = [answer is None for answer in answers]
                raise ValueError(
                    f"minibatches() ended in some workers and not in others, {ended}: it must "
                    "yield the same number in each worker"
                )
            yield answers

    def _observe(self, reports: Sequence[joint.BatchReport]) -> None:
        """Adds the workers' observations to the centre's running statistics."""
        if any(report.observed for report in reports):
            self._step.statistics.add([report.observed for report in reports])
            self._revision += 1

    def _apply(self, contributed: Sequence[Contribution]) -> dict[str, float]:
        metrics = self._step.apply([Contribution(m, as_tensor(g)) for m, g in contributed])
        self._revision += 1
        return metrics

    def _newer_weights(self, index: int) -> Any:
        state = self._state()
        if self._held[index] == state:
            return None
        self._held[index] = state
        if self._stored[0] != state:
            weights = packed(nn.ModuleDict(self.algo.models)), self._trained()
            self._stored = state, self._fleet.put(weights)
        return self._stored[1]

    def _state(self) -> tuple[int, tuple[bool, ...]]:
        """Returns the revision of the centre's weights, and which parameters are not frozen."""
        return self._revision, self._trained()


class Asynchronous(Centralised):
    """Gradients that the centre applies one after the other, as they arrive.

    A worker gets newer weights with every minibatch. Its gradient is dropped if the centre has
    taken more than `max_gradient_lag` steps in the meantime.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._dropped = 0
        # The current batch of each worker, with the metrics of its minibatches.
        self._learning: dict[int, tuple[joint.BatchReport, list[dict[str, float]]]] = {}

    def status(self) -> Mapping[str, float]:
        """Returns the totals of the workers' sources, and the number of dropped gradients."""
        return {**super().status(), "dropped_gradients": self._dropped}

    def _rounds(self) -> Iterator[joint.JointBatch]:
        """Yields a batch when a contribution has arrived. The update adds its report."""
        answers = self._gathering.each(self._next_step)
        for first in answers:
            self._answers = itertools.chain([first], answers)
            yield joint.JointBatch()

    def _next_step(self, index: int) -> Task:
        goes_on = index in self._learning
        return "step", self.counters.state_dict(), self._newer_weights(index), goes_on

    def update(self, batch: joint.JointBatch) -> UpdateResult:
        """Takes steps with gradients as they arrive, until a worker has finished its batch."""
        with self._step.restored_on_error():
            while True:
                index, answer = _needed(next(self._answers, None))
                if self._is_last(index, *answer):
                    report, learnt = self._learning.pop(index)
                    batch.reports.append(report)
                    metrics = means(learnt) | batch.lags(self.version)
                    return UpdateResult(metrics | self._step.count(report.env_steps))

    def _is_last(
        self, index: int, report: joint.BatchReport | None, contributed: Contribution | None
    ) -> bool:
        """Takes a step with an answer; returns whether it was the last of the worker's batch."""
        if report is not None:
            self._observe([report])
            self._latest[index] = report
            self._learning[index] = report, []
        if contributed is None:
            return True
        lag = self.counters.optimiser_steps - contributed.message["optimiser_steps"]
        if lag > self._config.max_gradient_lag:
            self._dropped += 1
            return False
        metrics = self._apply([contributed])
        learnt = self._learning[index][1]
        learnt.append(
            {**metrics, **contributed.message["batch_metrics"], "gradient_lag": float(lag)}
        )
        return bool(metrics) and self.algo.stops_after(metrics)


class Decentralised(GradientWorkers):
    """Synchronous gradients that the workers all-reduce, and each of them applies."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._store: Any = None
        self._updating: Task | None = None  # an update that has not ended
        self._is_copied = True  # whether the centre has the state of the workers

    def update(self, batch: joint.JointBatch) -> UpdateResult:
        """Lets all workers update together with their batches."""
        self._updating = "update", self._round, self._trained()
        return self._finish_update()

    def _rounds(self) -> Iterator[joint.JointBatch]:
        if self._updating is not None:  # an interrupt ended the wait for it
            self._finish_update()
        yield from super()._rounds()

    def _finish_update(self) -> UpdateResult:
        """Waits until all workers have updated: those that have started it wait for the others."""
        task = self._updating
        assert task is not None
        self._is_copied = False
        answers = self._asked(lambda index: task)
        for answer in answers:
            if isinstance(answer, str):
                raise NonFiniteError(answer)
        self.counters.load_state_dict(answers[0][1])
        self._updating = None
        return UpdateResult(means(metrics for metrics, _ in answers))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, which is the same in all workers. Copies it to the centre, so that it
        is known after the workers have ended.
        """
        if not self._is_copied:
            joint.load_state(self._step, self._state_of_one())
            self._is_copied = True
        return super().state_dict()

    def _state_of_one(self) -> bytes:
        """Asks one worker after the other for the state, even after the end of the run."""
        each_s = _ANSWER_S / len(self._workers)
        for index, worker in enumerate(self._workers):
            answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
            worker.call(answer.put, "state")
            try:
                with waiting_for(self._names[index]):
                    state = answer.get(timeout=each_s)
            except queue.Empty:
                why = f"it did not answer within {each_s:g} s"
            else:
                if isinstance(state, bytes):
                    return state
                why = str(error_in(state))
        raise RunError(f"no worker sent its state. The last one, {self._names[-1]}: {why}")

    def _meeting(self) -> Meeting:
        if self._store is None:
            self._store = served_store()  # while they need it
        # If workers share a GPU they add on the CPU, because nccl refuses two ranks on one GPU.
        device = "cuda" if self._config.gpus >= 1 else "cpu"
        return self._fleet.host, self._store.port, device


class Gathering:
    """Lets workers execute tasks, and gathers their answers.

        all()     start all -------- wait for all -------------> [a, b, c]
        each()    start all -------- wait for the first -------> (1, b)     start 1 again

    A worker has one task at a time, unless the gathering thread is interrupted. Then the next `all`
    or `each` gives every worker another task, and drops the answers to the tasks before, but no
    failure.

    Methods get `task`, which chooses the next task of a worker, by its number, just before it
    starts. They raise RunError or UsageError, with the name of the worker, if a worker has failed.

    Threads: one thread gathers; any thread may call `close`.

    Attributes:
        doing: the current task of each busy worker, and when it started. Other threads change it.
    """

    def __init__(
        self,
        names: Sequence[str],
        workers: Sequence[Worker],
        explain: Callable[[int, WorkerLost], WorkerLost],
    ) -> None:
        """names: of the workers, of which there may be none yet. explain: returns the error about
        a lost worker, with everything that is known about it.
        """
        self.doing: dict[int, tuple[str, float]] = {}
        self._names, self._workers, self._explain = names, workers, explain
        self._number = 0  # of the current `all` or `each`
        self._answers: queue.SimpleQueue[tuple[int, int, Any] | None] = queue.SimpleQueue()

    def close(self) -> None:
        """Ends every wait, now and later."""
        self._answers.put(None)

    def all(
        self,
        task: Callable[[int], Task],
        fraction: float = 1.0,
        hurry: Callable[[int], None] = lambda index: None,
    ) -> list[Any] | None:
        """Returns the answers of all workers, or None if closed. When this fraction of the workers
        has answered, it calls `hurry` for the others.
        """
        everyone = range(len(self._names))
        self._number += 1
        for index in everyone:
            self._start(index, task)
        answers: dict[int, Any] = {}
        while len(answers) < len(everyone):
            if (taken := self._take()) is None:
                return None
            index, answer = taken
            answers[index] = answer
            if not isinstance(answer, RankGone):  # the cause follows
                self._check(index, answer)
            if len(answers) == max(1, math.ceil(round(fraction * len(everyone), 6))):
                for other in set(everyone) - set(answers):
                    hurry(other)
        for index, answer in answers.items():
            self._check(index, answer)
        return [answers[index] for index in everyone]

    def each(self, task: Callable[[int], Task]) -> Iterator[tuple[int, Any]]:
        """Yields answers as they arrive, with the numbers of their workers, until closed. When the
        caller asks for the next one, the worker of the last one starts its next task.
        """
        self._number += 1
        for index in range(len(self._names)):
            self._start(index, task)
        while (taken := self._take()) is not None:
            self._check(*taken)
            yield taken
            self._start(taken[0], task)

    def _start(self, index: int, task: Callable[[int], Task]) -> None:
        method, *arguments = task(index)
        self.doing[index] = method, running_time()
        self._workers[index].call(
            functools.partial(self._put, self._number, index), method, *arguments
        )

    def _put(self, number: int, index: int, answer: Any) -> None:
        self.doing.pop(index, None)
        self._answers.put((number, index, answer))

    def _take(self) -> tuple[int, Any] | None:
        """Returns the next answer; None once closed."""
        while (taken := self._answers.get()) is not None:
            number, index, answer = taken
            if number == self._number or isinstance(answer, Exception):
                return index, answer
        self.close()  # for the next wait
        return None

    def _check(self, index: int, answer: Any) -> None:
        """Raises the failure of a worker."""
        error = error_in(answer, functools.partial(self._explain, index))
        if error is not None:
            kind = UsageError if isinstance(error, UsageError) else RunError
            raise kind(f"{self._names[index]}: {error}")


def gradient_workers(
    make: Make, config: GradientConfig, centre: OptimiserStep[Any], fleet: Fleet
) -> GradientWorkers:
    """Returns the gradient workers of a run, see GradientWorkers."""
    if not config.is_synchronous:
        return Asynchronous(make, config, centre, fleet)
    kind = Centralised if config.update_execution == "centralised" else Decentralised
    return kind(make, config, centre, fleet)


def _needed(answer: Answer | None) -> Answer:
    """Returns what was gathered; raises RunError if the run has ended before that."""
    if answer is None:
        raise RunError("the run has ended")
    return answer


def _dumped(make: Make) -> bytes:
    """Pickles a function; by value if it cannot be imported and cloudpickle is installed."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle.dumps(make)
    return cloudpickle.dumps(make)
