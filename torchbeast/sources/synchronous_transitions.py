# SPDX-License-Identifier: Apache-2.0
"""A source of transitions that collects only when a learner asks and no update is due.

    batches():   rollouts of all environments --> replay --> the updates that are due --> again

Every rollout is acted with the weights of the update before it, and every sample sees the
priorities of the one before it, so a run depends on no thread's speed.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchbeast.core.storages.transition import Transitions
from torchbeast.processes.supervisor import Supervisor
from torchbeast.sources.transitions import TransitionSource


class SynchronousTransitions(TransitionSource):
    """Yields samples of a replay. One thread iterates `batches`, and fills the replay meanwhile.

    The online source must collect nothing before it is asked. An iterator that an exception from
    outside has ended may be followed by another, which goes on.
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
