# SPDX-License-Identifier: Apache-2.0
"""Environments that end the run when a masked action is taken; `masked:NAME` names one."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete

from torchbeast.core.actors.contract import Acted, Actor

KEY = "action_mask"


class Blind(Actor):
    """Always takes action 0."""

    extra_specs: ClassVar[Any] = {}

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def choose(self, inputs: Any, state: Any, mode: Any) -> Acted:
        return Acted(self.distribution.zero_action(inputs.reward.shape), {}, state)


class Masked:
    """Step t allows the actions 1 + (s + t) % 3 and 3 of 0 to 3, s an environment's own number.

    The observation is random. An episode has 5 steps, is truncated if s is odd, and its last
    observation allows nothing.
    """

    num_choices = 4
    action_space: Any = Discrete(4)
    _random: Any = None
    observation_space: Any = Dict({"numbers": Box(-1, 1, (3,)), KEY: MultiBinary(4)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None or self._random is None:
            self._random = np.random.default_rng(seed)
        self._start, self._time = int(self._random.integers(100)), 0
        return self._seen(), self._info()

    def step(self, action: Any) -> Any:
        taken = np.atleast_1d(np.asarray(action))
        if not self._takes(taken):
            raise RuntimeError(f"the masked action {taken} was taken, allowed are {self._mask()}")
        self._time += 1
        ended, odd = self._time == 5, self._start % 2 == 1
        return self._seen(), float(self._time), ended and not odd, ended and odd, self._info()

    def _takes(self, taken: np.ndarray) -> bool:
        return bool(self._mask()[taken[0]])

    def _mask(self) -> np.ndarray:
        mask = np.zeros(self.num_choices, np.int8)
        if self._time < 5:
            mask[[1 + (self._start + self._time) % 3, 3]] = 1
        return mask

    def _numbers(self) -> np.ndarray:
        return self._random.uniform(-1, 1, 3).astype(np.float32)

    def _seen(self) -> Any:
        return {"numbers": self._numbers(), KEY: self._mask()}

    def _info(self) -> dict[str, Any]:
        return {}


class InInfo(Masked):
    """The same with masks in the info, none in the last one."""

    observation_space = Box(-1, 1, (3,))

    def _seen(self) -> Any:
        return self._numbers()

    def _info(self) -> dict[str, Any]:
        return {KEY: self._mask()} if self._time < 5 else {}


class Undeclared(InInfo):
    """The same with dicts as observations, and without an observation space."""

    observation_space = None

    def _seen(self) -> Any:
        return {"numbers": self._numbers()}


class Several(Masked):
    """Two choices, of 2 and 4: the first must be the parity of s + t, the second as in Masked."""

    num_choices = 6
    action_space = MultiDiscrete([2, 4])
    observation_space = Dict({"numbers": Box(-1, 1, (3,)), KEY: MultiBinary(6)})

    def _takes(self, taken: np.ndarray) -> bool:
        return bool(self._mask()[taken[0]] and self._mask()[2 + taken[1]])

    def _mask(self) -> np.ndarray:
        mask = np.zeros(6, np.int8)
        if self._time < 5:
            number = self._start + self._time
            mask[[number % 2, 2 + 1 + number % 3, 5]] = 1
        return mask


class Nothing(Masked):
    """Masks every action at step 3."""

    def _mask(self) -> np.ndarray:
        return super()._mask() * np.int8(self._time != 3)
