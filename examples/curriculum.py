# SPDX-License-Identifier: Apache-2.0
"""A curriculum: the corridor grows whenever the agent has learnt to walk it.

A random walk reaches the end of 30 fields in one of thousands of episodes, so an agent that begins
there learns nothing. Run the example without the curriculum to see it:

python examples/curriculum.py
python examples/curriculum.py --without
"""

from __future__ import annotations

import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from torchbeast import Learner, Scheme, make_vec
from torchbeast.learner import Callback, RunningLearner

LONGEST = 30


class Corridor(gymnasium.Env[np.ndarray, Any]):
    """Walk to the right end within twice as many steps as there are fields.

    `reset` takes the option `length`, the number of fields. Without it there are LONGEST.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0, LONGEST, (2,), np.float32)
        self.action_space = spaces.Discrete(2)  # left, right

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begins at the left end."""
        super().reset(seed=seed)
        self.length = (options or {}).get("length", LONGEST)
        self.position = self.time = 0
        return self._seen(), {}

    def step(self, action: int) -> Any:
        """Walks a field; the reward is 1 at the right end."""
        self.position = max(0, self.position + (1 if action == 1 else -1))
        self.time += 1
        has_arrived = self.position == self.length
        return self._seen(), float(has_arrived), has_arrived, self.time == 2 * self.length, {}

    def _seen(self) -> np.ndarray:
        return np.array([self.position, self.length], np.float32)


class Curriculum(Callback):
    """Makes the corridor twice as long whenever nine of ten episodes end well."""

    length = 3

    def on_start(self, learner: RunningLearner) -> None:
        """Begins with a short corridor."""
        learner.set_env_options({"length": self.length})

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        """Makes the corridor longer, at the next reset of each environment."""
        if metrics["mean_episode_return"] > 0.9 and self.length < LONGEST:
            self.length = min(2 * self.length, LONGEST)
            learner.set_env_options({"length": self.length})
        metrics["length"] = self.length  # a column of logs.csv


def main(is_taught: bool = True, target_steps: int = 60_000) -> float:
    """Trains with or without the curriculum; returns the mean return in the longest corridor."""
    envs = make_vec(Corridor, 8)
    callbacks = [Curriculum()] if is_taught else []
    with Learner(Scheme.preset("ppo", envs), target_steps, callbacks=callbacks, seed=1) as learner:
        while not learner.done():
            learner.step()
            if learner.updates % 10 == 0:
                learner.print_info()
        played = learner.evaluate(10)  # its environments get no options: the longest corridor
    return sum(played.returns) / len(played.returns)


if __name__ == "__main__":
    print(f"mean return in the longest corridor: {main('--without' not in sys.argv):.2f}")
