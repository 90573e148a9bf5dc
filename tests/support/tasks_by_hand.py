# SPDX-License-Identifier: Apache-2.0
"""Tasks with the spaces of Catch."""

from __future__ import annotations

from torchbeast.core.envs.contract import VecStep
from torchbeast.core.envs.spaces import ArrayNest
from torchbeast.envs.toy import Catch


class LateCatch(Catch):
    """Catch with another size of rewards, whose episodes a time limit cuts after two steps."""

    def step(self, action: ArrayNest) -> VecStep:
        step = super().step(action)
        cut = (self._time == 2) & ~step.terminated
        seen = self._observation()
        if not cut.any():
            return step._replace(reward=step.reward * 1000)
        self._begin(cut.nonzero()[0])
        return step._replace(
            observation=self._observation(),
            reward=step.reward * 1000,
            truncated=cut,
            episode_end=step.episode_end | cut,
            final_observation=seen[cut],
        )


def late_catch(num_envs: int) -> Catch:
    """Makes environments."""
    return LateCatch(num_envs)
