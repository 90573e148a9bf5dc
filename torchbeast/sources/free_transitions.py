# SPDX-License-Identifier: Apache-2.0
"""A source of transitions whose learner and environments never wait for each other, as in Ape-X
(Horgan et al. 2018, arXiv 1803.00933).

    online source --> rollouts --> replay thread --> replay <--> batches(): a sample for everyone
                                                                 who asks, since `learn_start`

How often a step is learnt from is decided by the speed of both sides alone.
"""

from __future__ import annotations

from torchbeast.core.storages.transition import Transitions
from torchbeast.sources.transitions import TransitionSource


class FreeTransitions(TransitionSource):
    """Yields samples of a replay as often as it is asked, once there are learn_start steps."""

    def _next(self) -> Transitions | None:
        with self._changed:
            while not (self._can_learn or self._ended):
                self._changed.wait()
            if self._ended:
                return None
        return self._prepare()

    @property
    def _can_learn(self) -> bool:
        return self._total > 0 and self._total >= self._waits

    def _prepare_due(self) -> bool:
        """Wakes the learners that waited for the first steps."""
        with self._changed:
            self._changed.notify_all()
            return not self._closed
