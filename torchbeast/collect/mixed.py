# SPDX-License-Identifier: Apache-2.0
"""A source that adds replayed columns to the batches of another source.

    online source --> [ online | spare ] --> replay thread --> [ online | replayed ] --> batches()
                                               ^   |                                        |
                                       windows |   | online columns, once they are learnt   v
                                               replay <-------------------------------- the learner

The online source leaves spare columns in its batches. The replay thread lets the replay write
windows into them, so no data is copied twice. It inserts the online columns only after the learner
has trained on the batch, so that the learner sees new data first.

At most `in_flight` batches are between the online source and their insertion: one in each learner
thread, and one that is being prepared. When batch k is prepared, exactly the batches up to
k - in_flight have been inserted. Sampling therefore does not depend on thread timing, and a run is
reproducible if its online source is.

Recurrent networks walk through episodes, window by window. Each batch in flight has its own set of
walks: batch k continues the walks of batch k - in_flight, from the recurrent states that the update
with that batch computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchbeast.collect.contract import Source
from torchbeast.collect.replay import Priorities, Replay, ReplayClosed, WithReplay
from torchbeast.core.base.nest import Nest, flatten, map_leaves, map_leaves2, pack_as
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.replay.transition_replay import importance_weights
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import RunError

_log = logging.getLogger("torchbeast.replay")

_NO_STATE = (
    "`losses` did not return final_state for a batch with replayed columns, but the next replayed "
    "rollouts begin with it: an algorithm that uses replay with a recurrent network must return "
    "the state after rows 0..T-1 as feedback, as core/algos/impala.py does"
)
NO_PRIORITIES = (
    "`losses` did not return priorities for a batch with importance weights: an algorithm that "
    "supports prioritised replay must return them as feedback, as core/algos/dqn.py does"
)


class MixedSource(WithReplay):
    """Yields batches of online and replayed columns.

    Threads: `start` adds the threads of the online source and the replay thread to the supervisor.
    When the supervisor ends, it closes both sources, which wakes all waiting threads. Several
    threads may iterate `batches`, each with its own iterator. A batch shares memory with the online
    source and is valid until its iterator advances or ends.
    """

    def __init__(
        self,
        online: Source,
        replay: Replay,
        *,
        batch_size: int,
        spare_columns: int,
        learn_start: int,
        in_flight: int,
        initial_state: Nest[Tensor],
        beta: float | None = None,
    ) -> None:
        """Makes a source; nothing is collected before `start`.

        online: its batches have batch_size columns and spare_columns after them.
        learn_start: number of transitions that the replay must hold before it is sampled.
        in_flight: number of batches in flight, one more than the number of learner threads.
        initial_state: of the actor, for one column; () without memory, or if states are extras.
        beta: exponent of importance weights, if the replay draws by priority.
        """
        super().__init__(online, replay.stats)
        self._replay = replay
        self._batch_size = batch_size
        self._spare_columns = spare_columns
        self._learn_start = learn_start
        self._initial_state = initial_state
        self._beta = beta
        self._lanes = [_Lane(number, online.batches()) for number in range(in_flight)]
        self._ready: queue.Queue[_Lane | None] = queue.Queue()  # as in Collector
        self._is_too_small = False
        # learn_start; stays True, though later trajectories reduce the size
        self._is_reached = False

    def batches(self) -> Iterator[Rollout]:
        """Yields rollouts [T+1, B + spare_columns, ...] on the CPU until the source is closed;
        [T+1, B, ...] while the replay holds too little.
        """
        while (lane := self._ready.get()) is not None:
            assert lane.rollout is not None
            is_learnt = False
            try:
                yield lane.rollout
                is_learnt = True
            finally:  # also if the iterator is abandoned
                with self._changed:
                    lane.is_learnt = is_learnt
                    self._changed.notify_all()
        self._ready.put(None)  # for the next thread

    def close(self) -> None:
        """Wakes all threads that wait here, in the online source or in the replay."""
        super().close()  # the replay thread ends, and tells the learner threads
        self._replay.close()

    def status(self) -> Mapping[str, float]:
        """Returns the metrics of the online source and of the replay. learner_queue_size includes
        the batches that are ready here.
        """
        status = super().status()
        ready = self._ready.qsize() * self._batch_size
        return {**status, "learner_queue_size": status["learner_queue_size"] + ready}

    # --- the replay thread

    def _run(self) -> None:
        try:
            with contextlib.suppress(ReplayClosed):
                for lane in itertools.cycle(self._lanes):
                    if not self._is_free(lane):
                        return
                    if (rollout := next(lane.batches, None)) is None:
                        return
                    lane.rollout, lane.is_learnt = self._joined(rollout, lane), None
                    self._ready.put(lane)
        finally:
            self._ready.put(None)

    def _is_free(self, lane: _Lane) -> bool:
        """Waits until the lane's batch is returned, and inserts it; False if closed meanwhile."""
        if lane.rollout is None:
            return True
        with self._changed:
            self._changed.wait_for(lambda: lane.is_learnt is not None or self._closed)
            if self._closed:
                return False
        if lane.is_learnt:
            if lane.rollout.feeds_back and lane.state is None:
                raise RunError(_NO_STATE)
            if self._beta is not None and lane.priorities is None:
                raise RunError(NO_PRIORITIES)
            online = slice(0, self._batch_size)
            self._replay.insert(arrays_of(lane.rollout), online, lane.priorities)
        lane.rollout = lane.priorities = None
        return True

    def _joined(self, rollout: Rollout, lane: _Lane) -> Rollout:
        """Returns the batch with replayed columns, or without its spare columns."""
        self._is_reached = self._is_reached or self._replay.stats().size >= self._learn_start
        spare = slice(self._batch_size, self._batch_size + self._spare_columns)
        is_walking = bool(flatten(self._initial_state))
        walk = lane.number * self._spare_columns if is_walking else None
        filled = self._replay.fill(arrays_of(rollout), spare, walk) if self._is_reached else None
        self._check_room(is_empty=self._is_reached and filled is None)
        if filled is None:
            online, lane.windows = rollout.columns(0, self._batch_size), _NO_WINDOWS
            weights, receive = self._weights(online, ()), lane.receive
            online = dataclasses.replace(online, weights=weights, give_feedback=receive)
            return online.without_resets()
        lane.windows = filled.windows
        if is_walking:
            self._write_states(rollout, lane, filled.begins)
        replayed = torch.zeros_like(rollout.done, memory_format=torch.contiguous_format)
        replayed[:, self._batch_size :] = True
        return dataclasses.replace(
            rollout,
            final_observation=_with_finals(rollout, filled.finals),
            replayed=replayed,
            weights=self._weights(rollout, filled.ratios),
            collected=rollout.unroll_length * self._batch_size,
            feeds_back=is_walking,
            give_feedback=lane.receive,
        ).without_resets()

    def _check_room(self, is_empty: bool) -> None:
        """Warns once the replay is full, but nothing can be sampled from it."""
        is_too_small = is_empty and self._replay.stats().fill == 1.0
        if is_too_small and not self._is_too_small:
            unit = "episode" if self._beta is None else "window"
            _log.warning(
                f"the replay is full but does not hold a complete {unit}, so nothing can be "
                "sampled from it: increase replay_size"
            )
        self._is_too_small = is_too_small

    def _weights(self, rollout: Rollout, ratios: Iterable[float]) -> Tensor | None:
        """Returns Rollout.weights; ratios: of the replayed columns. New ones are as likely as in
        uniform sampling.
        """
        if self._beta is None:
            return None
        weights = importance_weights(np.array([*[1.0] * self._batch_size, *ratios]), self._beta)
        return torch.from_numpy(weights).repeat(len(rollout.reward), 1)

    def _write_states(self, rollout: Rollout, lane: _Lane, begins: list[bool]) -> None:
        """Writes the recurrent state before every window: the initial state at the start of an
        episode, otherwise the state after the previous window of the walk.
        """
        written = rollout.initial_agent_state
        initial = map_leaves2(Tensor.expand_as, self._initial_state, written)
        states = written, initial, initial if lane.state is None else lane.state
        for to, first, after in zip(*map(flatten, states), strict=True):
            for column, is_first in enumerate(begins, start=self._batch_size):
                to[:, column] = (first if is_first else after)[:, column]
        lane.state = None


_NO_WINDOWS = np.empty(0, np.int64)


@dataclasses.dataclass(eq=False)
class _Lane:
    """The state shared by every in_flight-th batch."""

    number: int
    batches: Iterator[Rollout]  # of the online source; closing it would free a batch in use
    rollout: Rollout | None = None  # the batch that has not been inserted yet
    is_learnt: bool | None = None  # False: its iterator was abandoned; None: not returned yet
    # Recurrent state before row T of that batch, from its update; leaves [layers, columns, hidden]
    state: Nest[Tensor] | None = None
    windows: np.ndarray = dataclasses.field(default_factory=lambda: _NO_WINDOWS)  # in it
    priorities: Priorities | None = None  # from its update

    def receive(self, feedback: Feedback) -> None:
        """Keeps the recurrent state from which the next windows start, and the priorities."""
        if feedback.final_state is not None:
            self.state = map_leaves(Tensor.cpu, feedback.final_state)
        if feedback.priorities is not None:
            sizes = feedback.priorities.cpu().numpy()
            new = len(sizes) - len(self.windows)
            self.priorities = Priorities(sizes[:new], self.windows, sizes[new:])


def arrays_of(rollout: Rollout) -> dict[str, Any]:
    """Returns views of all tensors of a batch, by field."""
    return map_leaves(Tensor.numpy, rollout.tensors())


def _with_finals(rollout: Rollout, finals: list[np.ndarray]) -> Nest[Tensor]:
    """Returns the batch's final observations followed by these, leaves [K, *shape]."""
    if not finals:
        return rollout.final_observation
    own = rollout.final_observation
    more = pack_as(own, [torch.from_numpy(leaf) for leaf in finals])
    return map_leaves2(lambda *pair: torch.cat(pair), own, more)
