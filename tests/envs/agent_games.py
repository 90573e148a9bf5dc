# SPDX-License-Identifier: Apache-2.0
"""Games of several agents with PettingZoo's interfaces, without PettingZoo."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

NAMES = ("a", "b", "c")


class Visits:
    """Agents that come and go. They see their number, the step and their last action.

    step        0   1   2   3   4   5
    a           x   x   x   terminated
    b           x   x   x   x   x   truncated
    c                   x   x   x   terminated
    """

    possible_agents: ClassVar = list(NAMES)
    present = ("ab", "ab", "abc", "abc", "bc", "bc")
    terminated, truncated = ((3, "a"), (5, "c")), ((5, "b"),)

    def __init__(self, length: int = 5) -> None:
        self.agents: list[str] = []
        self.seeds: list[int | None] = []
        self.was_closed = False

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-10, 10, (3,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.time, self.agents = 0, list(self.present[0])
        return {name: self._seen(name, -1) for name in self.agents}, {}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents)
        self.time += 1
        ends = {name: (self.time, name) in self.terminated for name in self.possible_agents}
        cuts = {name: (self.time, name) in self.truncated for name in self.possible_agents}
        here = self.present[self.time]
        seen = {name: self._seen(name, actions.get(name, -1)) for name in here}
        rewards = {name: float(actions.get(name, 0)) for name in here}
        self.agents = [name for name in here if not ends[name] and not cuts[name]]
        return seen, rewards, ends, cuts, {name: {"time": self.time} for name in here}

    def _seen(self, name: str, action: int) -> Any:
        return np.array([NAMES.index(name), self.time, action], np.float32)

    def render(self) -> Any:
        return np.zeros((4, 5, 3), np.uint8)

    def close(self) -> None:
        self.was_closed = True


class Turns:
    """Agents take turns to add their action to a sum; who reaches 5 wins. 0 is not allowed."""

    possible_agents: ClassVar = ["first", "second"]
    metadata: ClassVar = {"is_parallelizable": False}

    def __init__(self) -> None:
        self.taken: list[tuple[str, int | None]] = []

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict(
            {"sum": spaces.Box(0, 10, (1,), np.float32), "action_mask": spaces.MultiBinary(3)}
        )

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(3)

    def agent_iter(self) -> Any:
        raise AssertionError("not used")

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.sum, self.agents = 0, list(self.possible_agents)
        self.agent_selection = "first"
        none: dict[str, Any] = dict.fromkeys(self.agents, False)
        self.terminations, self.truncations = dict(none), dict(none)
        self.rewards, self.infos = dict.fromkeys(self.agents, 0), {n: {} for n in self.agents}

    def observe(self, agent: str) -> Any:
        return {"sum": np.array([self.sum], np.float32), "action_mask": np.array([0, 1, 1])}

    def step(self, action: int | None) -> None:
        name, other = (
            self.agent_selection,
            next(each for each in self.possible_agents if each != self.agent_selection),
        )
        self.taken.append((name, action))
        self.rewards = dict.fromkeys(self.possible_agents, 0)
        if self.terminations[name]:
            assert action is None
            self.agents.remove(name)
        else:
            assert action in (1, 2), "0 is not allowed"
            self.sum += action
            if self.sum >= 5:
                self.rewards = {name: 1, other: -1}
                self.terminations = dict.fromkeys(self.possible_agents, True)
        self.agent_selection = other

    def render(self) -> None: ...

    close = render
