# SPDX-License-Identifier: Apache-2.0
"""A source of transitions: the rollouts of another source go through a replay.

    online source --> rollouts --> replay thread --> [ transitions ] --> batches() --> the learner
                                      |    ^                                |
                                 insert    sample                     priorities, where
                                      v    |                           they are used
                                      replay <------------------------------+

Once the replay holds `learn_start` steps, every new step allows `updates_per_step` more updates. At
any time the number of updates is

    floor((collected - learn_start) * updates_per_step)

The source takes the next rollout only when batches for all of these updates have been sampled, so
collection waits for the learner. Two batches are prepared ahead. Uniform sampling does not depend
on thread timing.

`SynchronousTransitions` starts no thread and prepares nothing ahead. With `FreeTransitions` neither
side waits for the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchbeast.collect.contract import Source
from torchbeast.collect.mixed import NO_PRIORITIES, arrays_of
from torchbeast.collect.replay import AGENT, WithReplay
from torchbeast.core.base.computing import own_settings
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.contract import joined_info
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.replay.transition_replay import (
    Sample,
    TransitionReplay,
    importance_weights,
)
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.storages.transition import Transitions
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor

_AHEAD = 2  # batches that are prepared


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When to update, and how to sample."""

    batch_size: int  # transitions
    updates_per_step: float  # after learn_start
    learn_start: int  # steps that the replay must hold before the first update
    total_steps: int  # env steps at which beta is 1
    first_step: int = 0  # env steps of earlier parts of the run
    beta: float | None = None  # initial beta of importance weights; None: uniform sampling

    def updates_after(self, steps: int) -> int:
        """Returns the total number of updates that are due `steps` steps after learn_start."""
        return math.floor(max(0, steps) * self.updates_per_step + 1e-9)

    def beta_at(self, collected: int) -> float:
        """Returns the importance-sampling exponent beta after `collected` steps of this part of the
        run. It grows linearly to 1 (Schaul et al. 2016, section 3.4).
        """
        assert self.beta is not None
        share = min(1.0, (self.first_step + collected) / self.total_steps)
        return self.beta + (1.0 - self.beta) * share


class TransitionSource(WithReplay):
    """Yields samples of a replay that it fills with the rollouts of another source.

    Threads: `start` adds the threads of the online source and the replay thread to the supervisor.
    When the supervisor ends, it closes both sources, which wakes all waiting threads. Several
    threads may iterate `batches`, each with its own iterator. A batch does not share memory.
    """

    def __init__(self, online: Source, replay: TransitionReplay, schedule: Schedule) -> None:
        """Makes a source; nothing is collected before `start`."""
        super().__init__(online, replay.stats)
        self._replay = replay
        self._schedule = schedule
        self._ready: deque[Transitions] = deque()
        self._ended = False  # nothing more is prepared
        # Used by the thread that takes rollouts only:
        self._waits = max(0, schedule.learn_start - replay.size)  # steps
        self._total = 0  # steps collected
        self._prepared = 0  # batches
        self._collected = _Collected()

    def batches(self) -> Iterator[Transitions]:
        """Yields transitions [B, ...] on the CPU until the source is closed."""
        while (batch := self._next()) is not None:
            yield batch

    # --- the learner threads

    def _next(self) -> Transitions | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._closed)
            if self._closed or not self._ready:
                return None
            prepared = self._ready.popleft()
            self._changed.notify_all()  # there is room for another
            return prepared

    def _note_priorities(self, names: np.ndarray, feedback: Feedback) -> None:
        """Gives the replay the new priorities of the transitions with these names."""
        if feedback.priorities is None:
            raise RunError(NO_PRIORITIES)
        with self._replay.lock:
            self._replay.set_priorities(names, feedback.priorities.cpu().numpy())

    # --- the replay thread

    def _run(self) -> None:
        try:
            for rollout in self._online.batches():
                self._insert(rollout)
                self._offer_due()
                if self._closed:
                    return
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _insert(self, rollout: Rollout) -> None:
        """Stores a rollout. Afterwards its memory belongs to the online source again."""
        with self._replay.lock:
            self._replay.insert(arrays_of(rollout), slice(0, rollout.batch_size), AGENT)
            self._collected.add(rollout)
            self._total += rollout.env_steps

    def _offer_due(self) -> None:
        """Lets the learners take the batches that are due, `_AHEAD` at a time."""
        for batch in self._due():
            with self._changed:
                self._changed.wait_for(lambda: len(self._ready) < _AHEAD or self._closed)
                self._ready.append(batch)
                self._changed.notify_all()

    def _due(self) -> Iterator[Transitions]:
        """Samples the batches that are due, until the source is closed."""
        due = self._schedule.updates_after(self._total - self._waits)
        while self._prepared < due and not self._closed:
            batch = self._prepare()
            self._prepared += 1
            yield batch

    def _prepare(self) -> Transitions:
        """Samples a batch, and attributes to it the steps collected since the batch before."""
        schedule = self._schedule
        with own_settings():
            with self._replay.lock:
                sample = self._replay.sample(schedule.batch_size)
                total, collected, self._collected = self._total, self._collected, _Collected()
            batch = collected.counted_in(transitions_of(sample))
            if schedule.beta is None:
                return batch
            weights = importance_weights(sample.probabilities, schedule.beta_at(total))
            give_feedback = functools.partial(self._note_priorities, sample.names)
            return dataclasses.replace(
                batch, weights=torch.from_numpy(weights), give_feedback=give_feedback
            )


class FreeTransitions(TransitionSource):
    """Yields samples as fast as the learner asks for them, once there are learn_start steps.

    Learner and environments never wait for each other, as in Ape-X (Horgan et al. 2018, arXiv
    1803.00933). How often a step is sampled therefore depends on the speed of both sides.
    """

    def _next(self) -> Transitions | None:
        with self._changed:
            self._changed.wait_for(
                lambda: 0 < self._total >= self._waits or self._ended or self._closed
            )
            if self._ended or self._closed:
                return None
        return self._prepare()

    def _offer_due(self) -> None:
        """Wakes the learners that waited for the first steps."""
        with self._changed:
            self._changed.notify_all()


class SynchronousTransitions(TransitionSource):
    """Yields samples of a replay, and collects in the same thread, in turns: when the learner asks
    for a batch and no update is due, it collects the next rollouts.

    Every rollout uses the weights of the update before it, and every sample uses the priorities of
    the update before it, so a run does not depend on thread timing. The online source must not
    collect anything before it is asked. If an exception from outside ends an iterator, another
    iterator can continue.
    """

    def start(self, supervisor: Supervisor) -> None:
        """Lets `batches` collect."""
        supervisor.on_close(self.close)
        self._online.start(supervisor)

    def batches(self) -> Iterator[Transitions]:
        """Yields transitions [B, ...] on the CPU until the source is closed."""
        yield from self._due()
        for rollouts in self._online.batches():
            self._insert(rollouts)
            yield from self._due()


@dataclass
class _Collected:
    """Counts what was collected since the last batch."""

    steps: int = 0
    episodes: list[tuple[float, int]] = field(default_factory=list)
    info: dict[str, list[float]] = field(default_factory=dict)  # of the episodes, by keyword
    versions: int = 0  # sum over steps of the policy version that acted
    oldest: int | None = None

    def add(self, rollout: Rollout) -> None:
        """Counts a rollout and its finished episodes."""
        versions = rollout.policy_version[1:]
        oldest = int(versions.min())
        self.steps += rollout.env_steps
        self.episodes += zip(*rollout.finished_episodes(), strict=True)
        self.info = joined_info([self.info, rollout.finished_info()])
        self.versions += int(versions.sum())
        self.oldest = oldest if self.oldest is None else min(self.oldest, oldest)

    def counted_in(self, batch: Transitions) -> Transitions:
        """Returns the batch with these counts, so that each step is counted in one batch."""
        by = None if self.oldest is None else (self.versions / self.steps, self.oldest)
        return dataclasses.replace(
            batch,
            env_steps=self.steps,
            episodes=tuple(self.episodes),
            info=self.info,
            collected_by=by,
        )


def transitions_of(sample: Sample) -> Transitions:
    """Returns a sample as tensors that share its memory."""
    arrays = sample._asdict()
    del arrays["names"], arrays["probabilities"]
    fields: dict[str, Any] = map_leaves(torch.from_numpy, arrays)
    if not sample.later_rewards.shape[1]:
        fields.update(later_rewards=None, num_joined=None)
    return Transitions(**fields, env_steps=0)
