# SPDX-License-Identifier: Apache-2.0
"""Another source with a replay around it, started for as long as a `with` block."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from assorted import check_rollout
from compliance.source import Running, Setup

from torchbeast.collect.replayed import MixedSource
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.replay.rollout_replay import RolloutReplay
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.fleets.supervisor import Supervisor

CAPACITY = 400  # transitions: soon full
IN_FLIGHT = 4  # the compliance suite has three learner threads
SPARE = 3  # columns


class NotStarted:
    """A source that is started already: MixedSource starts it again."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def start(self, supervisor: Supervisor) -> None:
        pass


class NewColumns:
    """Yields the new columns of the batches of a MixedSource, with the data of a plain source."""

    def __init__(self, source: MixedSource, batch_size: int) -> None:
        self._source = source
        self._batch_size = batch_size
        self.replayed = 0  # columns seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def batches(self) -> Iterator[Rollout]:
        for rollout in self._source.batches():
            check_rollout(rollout)
            rollout.give_feedback(Feedback(final_state=rollout.initial_agent_state))
            self.replayed += rollout.batch_size - self._batch_size
            yield rollout.columns(0, self._batch_size)


def replay_of(running: Running, setup: Setup, capacity: int = CAPACITY) -> RolloutReplay:
    agent = running.agent
    specs = RolloutSpec(agent, setup.extras, setup.unroll_length).fields()
    capacity = max(capacity, 20 * setup.unroll_length)
    return RolloutReplay(specs, capacity, agent.frame_stack, seed=5)


@contextmanager
def mixing(online: AbstractContextManager[Running], setup: Setup) -> Iterator[Running]:
    """The new columns of a MixedSource, which replays as soon as an episode is whole.

    online: a source with SPARE columns that lets IN_FLIGHT batches be taken.
    """
    with online as running:
        source = MixedSource(
            NotStarted(running.source),
            replay_of(running, setup),
            batch_size=setup.batch_size,
            spare_columns=SPARE,
            learn_start=0,
            in_flight=IN_FLIGHT,
            initial_state=running.agent.model.initial_state(1),
        )
        source.start(running.supervisor)
        yield dataclasses.replace(running, source=NewColumns(source, setup.batch_size))
