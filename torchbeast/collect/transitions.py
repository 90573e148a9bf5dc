# SPDX-License-Identifier: Apache-2.0
"""A source of transitions: the rollouts of another source go through a replay.

    online source --> rollouts --> replay thread --> [ transitions ] --> batches() --> the learner
                                      |    ^                                |
                                 insert    sample                     priorities, where
                                      v    |                           they are used
                                      replay <------------------------------+

From `learn_start` steps in the replay on, every new step brings `updates_per_step` updates. Their
number is at any time

    floor((collected - learn_start) * updates_per_step)

The next rollout is taken from the online source once those are sampled, so collecting waits for
learning. Two batches are prepared ahead. Uniform samples depend on no thread's speed.

`SynchronousTransitions` has no thread and prepares nothing ahead; with `FreeTransitions` neither
side waits for the other.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import torch

from torchbeast.collect.contract import Source
from torchbeast.collect.mixed import arrays_of
from torchbeast.collect.replay import AGENT, WithReplay
from torchbeast.core.base.ambient import own_settings
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
_NO_PRIORITIES = (
    "`losses` did not return priorities for a batch with importance weights: an algorithm that "
    "supports prioritised replay must return them as feedback, as core/algos/dqn.py does"
)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When and how transitions are learnt from."""

    batch_size: int  # transitions
    updates_per_step: float  # after learn_start
    learn_start: int  # steps in the replay from which on it is learnt from
    total_steps: int  # env steps at which beta is 1
    first_step: int = 0  # env steps of earlier parts of the run
    beta: float | None = None  # of importance weights at first; None: samples are uniform

    def updates_after(self, steps: int) -> int:
        """Returns how many updates belong to so many steps after learn_start."""
        return math.floor(max(0, steps) * self.updates_per_step + 1e-9)

    def beta_at(self, collected: int) -> float:
        """Returns beta after so many steps of this part of the run (Schaul et al. 2016, section
        3.4): it grows linearly to 1.
        """
        assert self.beta is not None
        share = min(1.0, (self.first_step + collected) / self.total_steps)
        return self.beta + (1.0 - self.beta) * share


class TransitionSource(WithReplay):
    """Yields samples of a replay that it fills with the rollouts of another source.

    Threads: `start` adds those of the online source and the replay thread to the supervisor, whose
    end closes both, which wakes everyone. `batches` may be iterated from several threads, each with
    its own iterator. A batch has memory of its own.
    """

    yields = Transitions

    def __init__(self, online: Source, replay: TransitionReplay, schedule: Schedule) -> None:
        """Makes a source; nothing is collected before `start`."""
        super().__init__(online, replay.facts())
        self._replay = replay
        self._schedule = schedule
        self._lock = threading.Lock()  # held by whoever uses the replay
        self._changed = threading.Condition()
        self._ready: deque[Transitions] = deque()
        self._ended = False  # nothing more is prepared
        self._closed = False
        # Of the thread that takes rollouts:
        self._waits = max(0, schedule.learn_start - replay.size)  # steps
        self._total = 0  # steps collected
        self._prepared = 0  # batches
        self._collected = _Collected()

    def start(self, supervisor: Supervisor) -> None:
        """Starts collecting."""
        supervisor.on_close(self.close)
        self._online.start(supervisor)
        supervisor.start_thread("replay", self._run)

    def batches(self) -> Iterator[Transitions]:
        """Yields transitions [B, ...] on the CPU until the source is closed."""
        while (batch := self._next()) is not None:
            yield batch

    def close(self) -> None:
        """Ends every wait here and in the online source; may be called again."""
        self._online.close()
        with self._changed:
            self._closed = self._ended = True
            self._changed.notify_all()

    @property
    def inserted(self) -> int:
        """Steps inserted into the replay so far."""
        return self._replay.inserted

    def save_replay(self, file: BinaryIO) -> None:
        """Writes the replay's contents to a file. Nothing is inserted or sampled meanwhile."""
        with self._lock:
            self._replay.save(file)

    # --- the learner threads

    def _next(self) -> Transitions | None:
        with self._changed:
            while not self._ready and not self._ended:
                self._changed.wait()
            if self._closed or not self._ready:
                return None
            prepared = self._ready.popleft()
            self._changed.notify_all()  # there is room for another
            return prepared

    def _note_priorities(self, names: np.ndarray, feedback: Feedback) -> None:
        """Gives the replay the new priorities of the transitions with these names."""
        if feedback.priorities is None:
            raise RunError(_NO_PRIORITIES)
        with self._lock:
            self._replay.set_priorities(names, feedback.priorities.cpu().numpy())

    # --- the replay thread

    def _run(self) -> None:
        try:
            for rollout in self._online.batches():
                self._insert(rollout)
                if not self._prepare_due():
                    return
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _insert(self, rollout: Rollout) -> None:
        """Stores a rollout, whose memory is the online source's again afterwards."""
        with self._lock:
            self._replay.insert(arrays_of(rollout), slice(0, rollout.batch_size), AGENT)
            self._facts = self._replay.facts()
            self._collected.add(rollout)
            self._total += rollout.env_steps

    def _prepare_due(self) -> bool:
        """Samples the batches that are due; returns False once the source is closed."""
        while self._prepared < self._schedule.updates_after(self._total - self._waits):
            prepared = self._prepare()
            with self._changed:
                while len(self._ready) >= _AHEAD and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return False
                self._ready.append(prepared)
                self._changed.notify_all()
            self._prepared += 1
        return True

    def _prepare(self) -> Transitions:
        """Samples a batch, which counts what was collected since the last one."""
        schedule = self._schedule
        with own_settings():
            with self._lock:
                sample = self._replay.sample(schedule.batch_size)
                self._facts = self._replay.facts()
                total, collected, self._collected = self._total, self._collected, _Collected()
            batch = collected.counted_in(transitions_of(sample))
            if schedule.beta is None:
                return batch
            weights = importance_weights(sample.probabilities, schedule.beta_at(total))
            hand_back = functools.partial(self._note_priorities, sample.names)
            return dataclasses.replace(
                batch, weights=torch.from_numpy(weights), hand_back=hand_back
            )


class FreeTransitions(TransitionSource):
    """Yields samples of a replay as often as it is asked, once there are learn_start steps.

    Learner and environments never wait for each other, as in Ape-X (Horgan et al. 2018, arXiv
    1803.00933): how often a step is learnt from is decided by the speed of both sides alone.
    """

    def _next(self) -> Transitions | None:
        with self._changed:
            while not (0 < self._total >= self._waits or self._ended):
                self._changed.wait()
            if self._ended:
                return None
        return self._prepare()

    def _prepare_due(self) -> bool:
        """Wakes the learners that waited for the first steps."""
        with self._changed:
            self._changed.notify_all()
            return not self._closed


class SynchronousTransitions(TransitionSource):
    """Yields samples of a replay. One thread iterates `batches`, and fills the replay meanwhile: it
    collects when the learner asks and no update is due.

    Every rollout is acted with the weights of the update before it, and every sample sees the
    priorities of the one before it, so a run depends on no thread's speed. The online source must
    collect nothing before it is asked. An iterator that an exception from outside has ended may be
    followed by another, which goes on.
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

    def _due(self) -> Iterator[Transitions]:
        while self._prepared < self._schedule.updates_after(self._total - self._waits):
            if self._closed:
                return
            batch = self._prepare()
            self._prepared += 1
            yield batch


@dataclass
class _Collected:
    """What was collected since the last batch that counted it."""

    steps: int = 0
    episodes: list[tuple[float, int]] = field(default_factory=list)
    info: dict[str, list[float]] = field(default_factory=dict)  # of the episodes, by keyword
    versions: int = 0  # the sum of those that acted
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
        """Returns the batch, which alone counts what was collected until now."""
        by = None if self.oldest is None else (self.versions / self.steps, self.oldest)
        return dataclasses.replace(
            batch,
            env_steps=self.steps,
            episodes=tuple(self.episodes),
            info=self.info,
            collected_by=by,
        )


def transitions_of(sample: Sample) -> Transitions:
    """Returns a sample as tensors, which share its memory."""
    is_joined = sample.later_rewards.shape[1] > 0
    return Transitions(
        observation=_tensors(sample.observation),
        action=_tensors(sample.action),
        reward=torch.from_numpy(sample.reward),
        terminated=torch.from_numpy(sample.terminated),
        next_observation=_tensors(sample.next_observation),
        later_rewards=torch.from_numpy(sample.later_rewards) if is_joined else None,
        num_joined=torch.from_numpy(sample.num_joined) if is_joined else None,
        extras=_tensors(sample.extras),
        policy_version=torch.from_numpy(sample.policy_version),
        env_steps=0,
    )


def _tensors(nest: Any) -> Any:
    return map_leaves(torch.from_numpy, nest)
