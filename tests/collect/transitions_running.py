# SPDX-License-Identifier: Apache-2.0
"""Another source with a replay of transitions around it, started for as long as a `with` block.

`check_contract` is the part of the compliance suite that depends on what is between a source and a
replay; MonoBeast's passes all of it.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from compliance.source import CASES, Running, Setup, SourceCompliance, copy_of, recorded
from mixed_running import NotStarted

from torchbeast.collect.replayed import Schedule, TransitionSource
from torchbeast.core.storages.replay.transition_replay import TransitionReplay
from torchbeast.core.storages.rollout import Rollout, RolloutSpec

CAPACITY = 400  # transitions: soon full


class Counted:
    """Yields the rollouts that a TransitionSource has inserted, once its batches count them."""

    def __init__(self, running: Running, setup: Setup) -> None:
        agent = running.agent
        fields = RolloutSpec(agent, setup.extras, setup.unroll_length).fields()
        capacity = max(CAPACITY, 20 * setup.unroll_length)
        replay = TransitionReplay(fields, capacity, agent.frame_stack)
        schedule = Schedule(
            batch_size=3,
            updates_per_step=1 / (setup.batch_size * setup.unroll_length),
            learn_start=0,
            total_steps=1000,
        )
        self._online = running.source
        self._source = TransitionSource(NotStarted(self), replay, schedule)  # type: ignore[arg-type]
        self._inserted: deque[Rollout] = deque()
        self._lock = threading.Lock()
        self._outer = _Outer(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._online, name)

    def batches(self) -> Iterator[Rollout]:
        """For the TransitionSource: the online source's, of which copies are kept."""
        for rollout in self._online.batches():
            self._inserted.append(copy_of(rollout))
            yield rollout

    def counted(self) -> Iterator[Rollout]:
        for transitions in self._source.batches():
            with self._lock:
                steps, rollouts = transitions.env_steps, []
                while steps > 0:
                    rollouts.append(self._inserted.popleft())
                    steps -= rollouts[-1].env_steps
                assert steps == 0
            yield from rollouts


class _Outer:
    """What the compliance suite sees."""

    def __init__(self, counted: Counted) -> None:
        self._counted = counted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._counted._source, name)

    def batches(self) -> Iterator[Rollout]:
        return self._counted.counted()


@contextmanager
def counting(online: AbstractContextManager[Running], setup: Setup) -> Iterator[Running]:
    """The rollouts that went through a TransitionSource around the online source."""
    with online as running:
        counted = Counted(running, setup)
        counted._source.start(running.supervisor)
        yield dataclasses.replace(running, source=counted._outer)


def check_contract(running: Callable[[Setup], AbstractContextManager[Running]]) -> None:
    """Asserts that rollouts come unchanged, in order and all of them.

    running: starts the source, with the replay around it.
    """
    record = functools.cache(lambda case: recorded(running(CASES[case]), CASES[case]))
    suite = SourceCompliance()
    for case in ("counting", "stacked-lstm"):
        suite.test_every_field_has_its_dtype_and_shape(record(case))
        suite.test_row_0_repeats_the_last_row_of_the_rollout_before(record(case))
        suite.test_rollouts_are_numbered_by_environment_and_from_0_within_it(record(case))
    suite.test_ends_counters_and_returns_match_their_definition(record)
    suite.test_the_last_observation_of_a_truncated_episode_is_kept(record)
    suite.test_finished_episodes_are_whole_games(record)
