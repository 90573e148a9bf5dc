# SPDX-License-Identifier: Apache-2.0
"""Rows that only begin an episode travel from a server to rollouts, and count as no step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from served_envs import EPISODE_LENGTH, REWARD, Vector
from serving import playing, serving

from torchbeast.core.envs import VecStep

LATE: dict[str, Any] = {
    "env_id": "Late",
    "num_envs": Vector.num_envs,
    "num_streams": 1,
    "frame_stack": 1,
    "observation": ("int32", (1,)),
    "action_space": {"type": "Discrete", "n": 4, "start": 1},
}


class Late(Vector):
    """Environment 0 begins its episodes one step late; the others never end."""

    is_late = False

    def step(self, action: Any) -> Any:
        step = super().step(action)
        only_first = np.arange(self.num_envs) == 0
        if self.is_late:
            self.time, self.is_late = 0, False
            reward = np.where(only_first, 0, step.reward).astype(np.float32)
            none = np.zeros(self.num_envs, bool)
            return VecStep(self.observation(), reward, only_first, none, none, None, only_first)
        self.is_late = bool(step.episode_end[0])
        ended = step.episode_end & only_first
        return step._replace(terminated=ended, episode_end=ended)


def test_counters_of_a_reset_row_are_those_of_a_first_row(address: str) -> None:
    rows = 0
    with serving(Late, address, description=LATE), playing([address], unroll_length=4) as game:
        for nest, beside in game.rollouts(6):
            _, reward, done, step, returns = (leaf.numpy() for leaf in nest[0][0])
            resets = done & (step == 0)
            assert not resets[:, 1:].any() or resets[0].all(), "only the first row of all"
            assert (reward[resets] == 0).all() and (returns[resets] == 0).all()
            ended = beside["episode_end"].numpy()
            assert (step[ended] == EPISODE_LENGTH).all()
            assert (returns[ended] == REWARD * EPISODE_LENGTH).all()
            after = resets[:-1, 0]
            assert (step[1:, 0][after] == 1).all() and (returns[1:, 0][after] == REWARD).all()
            rows += int(after.sum())
    assert rows > 4


class Lives(Late):
    """Environment 0 begins its lives one step late, within one game."""

    def step(self, action: Any) -> Any:
        return super().step(action)._replace(episode_end=np.zeros(self.num_envs, bool))


def test_a_row_that_begins_a_life_is_a_reset_row_within_a_game(address: str) -> None:
    ends: list[int] = []
    with serving(Lives, address, description=LATE), playing([address], unroll_length=4) as game:
        for nest, _ in game.rollouts(6):
            _, _, done, step, _ = (leaf.numpy()[1:, 0] for leaf in nest[0][0])
            ends += step[done].tolist()
    assert len(ends) > 4 and not any(ends[1::2]), "every second one only begins a life"
    assert ends[::2] == [EPISODE_LENGTH * number for number in range(1, len(ends[::2]) + 1)]


def test_resets_of_another_form_are_a_failure_of_the_environment(address: str) -> None:
    class Wrong(Vector):
        def step(self, action: Any) -> Any:
            return VecStep(*super().step(action), np.zeros(2, bool))

    with serving(Wrong, address, description=LATE):
        with pytest.raises(RuntimeError, match=r"resets must be bool\[3\], got bool\[2\]"):
            with playing([address]) as game:
                game.rollout()
