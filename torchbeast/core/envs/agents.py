# SPDX-License-Identifier: Apache-2.0
"""Games of several agents, of PettingZoo's interfaces, as a VecEnv in which each agent is an
environment.

    column   0  1  2    3  4  5    6  7          two games of three agents; columns 6 and 7
    game     0  0  0    1  1  1    -  -          cannot hold a whole game, and stay idle
    agent    a  b  c    a  b  c    -  -

All agents have one policy. An agent that is not in the game, before it joins or after its end, has
rows of VecStep.resets, from which nothing learns. The next game begins when all agents have ended.

In a game of turns every agent has a row in every turn. An agent that waits may only choose the
action 0, by its action mask, and the game ignores it: such a step changes no policy, because its
probability is 1.

PettingZoo is imported only to convert its own environments.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten, pack_as
from torchbeast.core.envs.contract import (
    MASK,
    FinalInfo,
    FiniteCheck,
    check_rewards,
    env_repr,
    picture_of,
    refusing,
)
from torchbeast.core.envs.spaces import (
    ArrayNest,
    Discrete,
    from_gymnasium,
    matching_leaves,
    observation_spec,
)
from torchbeast.core.envs.vec_env import VecStep, action_rows, environment_seeds
from torchbeast.errors import UsageError

_log = logging.getLogger("torchbeast.agents")


def has_agents(env: Any) -> bool:
    """Returns whether this is an environment of several agents, with a space for each."""
    return callable(getattr(env, "action_space", None))


class AgentsEnv:
    """The agents of several games, each a column of num_envs.

    Attributes:
        began: bool [games], the games that began in the last step, or in `reset`.
    """

    frame_stack = 1
    final_info: FinalInfo
    __repr__ = env_repr

    def __init__(
        self, first: Any, make_game: Callable[[], Any], num_envs: int, env_id: str
    ) -> None:
        """Makes as many whole games as there are columns for, the first one already made.

        Raises UsageError for games that one policy cannot play.
        """
        self.env_id, self.num_envs, self._make_game = env_id, num_envs, make_game
        self._games = [_parallel(first, env_id)]
        self._names = _names(self._games[0], env_id)
        self.num_agents = len(self._names)
        self._games += [
            _parallel(make_game(), env_id) for _ in range(1, num_envs // self.num_agents)
        ]
        observation, action = _spaces(self._games[0], self._names, env_id)
        with refusing(env_id):
            self.observation_space = observation_spec(observation)
            self.action_space = from_gymnasium(action)
        self._specs = flatten(self.observation_space)
        space = self.observation_space
        named = sorted(space.items()) if isinstance(space, dict) else [("", space)]
        self._filler = [int(name == MASK) for name, leaf in named for _ in flatten(leaf)]
        self._check_finite = FiniteCheck(space)
        self._steps = [0] * len(self._games)
        self.began = np.zeros(len(self._games), bool)
        self._options: Mapping[str, Any] | None = None
        self._plays = np.zeros(num_envs, bool)  # agents that are in their game
        self.final_info = {}

    def resized(self, num_envs: int) -> AgentsEnv:
        """Returns the same games for another number of columns, in place of these."""
        return AgentsEnv(self._games[0], self._make_game, num_envs, self.env_id)

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Gives the games options, which each gets whenever it is reset from now on."""
        self._options = dict(options)

    def reset(self, seed: int) -> ArrayNest:
        if self.num_envs < self.num_agents:
            raise UsageError(
                f"{self.env_id} has {self.num_agents} agents, each of which counts as an "
                f"environment, and got room for {self.num_envs}: give every process that steps "
                f"environments a multiple of {self.num_agents}, for example num_actors "
                f"{4 * self.num_agents} with num_processes 2 (num_servers in PolyBeast)"
            )
        if idle := self.num_envs % self.num_agents:
            _log.warning(
                "%d of the %d environments of a process stay idle, because a game of %s has %d "
                "agents: give every process a multiple of it",
                *(idle, self.num_envs, self.env_id, self.num_agents),
            )
        rows = self._empty_rows()
        self.final_info = {}
        self._plays[:] = False
        for number, game_seed in enumerate(environment_seeds(seed, len(self._games))):
            self._begin(number, game_seed, rows)
        return self._checked(rows)

    def step(self, action: ArrayNest) -> VecStep:
        rows, before = self._empty_rows(), self._plays.copy()
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        finals: list[list[np.ndarray]] = []
        self.final_info = infos = {}
        self.began[:] = False
        split = self._split(action)
        for number, game in enumerate(self._games):
            columns = self._columns(number)
            chosen = {name: split(column) for name, column in columns.items() if before[column]}
            seen, rewards, ends, cuts, told = game.step(chosen)
            self._steps[number] += 1
            for name, column in columns.items():
                if name not in seen:  # it is not in the game, or no longer
                    terminated[column] = before[column]
                    self._plays[column] = False
                    continue
                self._write(rows, number, column, seen[name])
                if not before[column]:  # it joins
                    self._plays[column] = True
                    continue
                reward[column] = rewards[name]
                if not math.isfinite(reward[column]):
                    check_rewards(reward, self._where)
                terminated[column] = bool(ends[name])
                truncated[column] = bool(cuts[name]) and not ends[name]
                if truncated[column]:
                    finals.append([row[column].copy() for row in rows])
                if terminated[column] or truncated[column]:
                    infos[column] = dict(told.get(name, {}))
                    self._plays[column] = False
                    self._fill(rows, column)
            if not game.agents:
                self._begin(number, None, rows)
        last = [np.stack(leaf) for leaf in zip(*finals, strict=True)]
        final = pack_as(self.observation_space, last) if finals else None
        if final is not None:
            self._check_finite(last, lambda _: f"{self.env_id}, a last observation")
        ended, resets = terminated | truncated, ~before
        late = resets if resets.any() else None
        return VecStep(
            self._checked(rows), reward, terminated | resets, truncated, ended, final, late
        )

    def render(self) -> np.ndarray | None:
        """Returns a picture of the first game, uint8 [H, W, 3], or None if it renders no array."""
        return picture_of(self._games[0])

    def close(self) -> None:
        """Closes every game."""
        for game in self._games:
            game.close()

    def _columns(self, number: int) -> dict[str, int]:
        """Returns the column of each agent of a game."""
        first = number * self.num_agents
        return {name: first + index for index, name in enumerate(self._names)}

    def _begin(self, number: int, seed: int | None, rows: list[np.ndarray]) -> None:
        """Starts a game, and writes the first observations of its agents."""
        seen, _ = self._games[number].reset(seed=seed, options=self._options)
        self._steps[number], self.began[number] = 0, True
        for name, column in self._columns(number).items():
            self._plays[column] = name in seen
            if name in seen:
                self._write(rows, number, column, seen[name])

    def _empty_rows(self) -> list[np.ndarray]:
        """Returns leaves [E, ...] of agents that are not in their game."""
        rows = [np.empty((self.num_envs, *spec.shape), spec.dtype) for spec in self._specs]
        self._fill(rows, slice(None))
        return rows

    def _fill(self, rows: list[np.ndarray], columns: int | slice) -> None:
        """Writes what agents see that are not in their game: zeros, and a mask that allows all."""
        for row, filler in zip(rows, self._filler, strict=True):
            row[columns] = filler

    def _write(self, rows: list[np.ndarray], number: int, column: int, observation: Any) -> None:
        name = self._names[column % self.num_agents]
        path = f"{self.env_id}, agent {name}: observation"
        leaves = matching_leaves(self.observation_space, observation, path)
        for row, leaf in zip(rows, leaves, strict=True):
            row[column] = leaf

    def _checked(self, rows: list[np.ndarray]) -> ArrayNest:
        self._check_finite(rows, self._where)
        return pack_as(self.observation_space, rows)

    def _where(self, column: int) -> str:
        number, index = divmod(column, self.num_agents)
        step = self._steps[number]
        return f"agent {self._names[index]} of game {number} of {self.env_id}, step {step}"

    def _split(self, action: ArrayNest) -> Callable[[int], Any]:
        """Returns a function that gives the action of a column."""
        leaves = [
            action_rows(space, leaf, self.num_envs)
            for space, leaf in zip(flatten(self.action_space), flatten(action), strict=True)
        ]
        return lambda column: pack_as(self.action_space, [leaf[column] for leaf in leaves])


def _names(game: Any, env_id: str) -> list[str]:
    names = list(getattr(game, "possible_agents", ()))
    if not names:
        raise UsageError(
            f"{env_id}: expected a list possible_agents, got none: one column is kept for each "
            "agent that a game may have"
        )
    return names


def _spaces(game: Any, names: list[str], env_id: str) -> tuple[Any, Any]:
    """Returns the observation and action spaces that all agents have."""
    found = [(game.observation_space(name), game.action_space(name)) for name in names]
    for name, spaces in zip(names, found, strict=True):
        for what, space, first in zip(("observation", "action"), spaces, found[0], strict=True):
            if space != first:
                raise UsageError(
                    f"{env_id}: one policy plays all agents, so they need equal spaces, but the "
                    f"{what} space of {names[0]} is {first}, and {name} has {space}: pad "
                    "them in a wrapper, for example one of SuperSuit's"
                )
    return found[0]


def _parallel(env: Any, env_id: str) -> Any:
    """Returns the environment with PettingZoo's parallel interface."""
    if not hasattr(env, "agent_iter"):
        return env
    if getattr(env, "metadata", {}).get("is_parallelizable"):
        from pettingzoo.utils.conversions import aec_to_parallel

        return aec_to_parallel(env)
    return _Turns(env, env_id)


class _Turns:
    """A game of turns with the parallel interface: a step is the turn of one agent."""

    def __init__(self, env: Any, env_id: str) -> None:
        self._env = env
        self.possible_agents = list(env.possible_agents)
        for name in self.possible_agents:
            action = from_gymnasium(env.action_space(name))
            spaces = getattr(env.observation_space(name), "spaces", None)
            if not isinstance(action, Discrete) or MASK not in (spaces or {}):
                raise UsageError(
                    f"{env_id}: a game of turns needs Discrete actions and observations that are "
                    f"dicts with an {MASK}, by which agents wait for their turn; the agent "
                    f"{name} has {env.action_space(name)} and {env.observation_space(name)}"
                )
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.render, self.close = env.render, env.close

    @property
    def agents(self) -> list[str]:
        """The agents that have not ended."""
        return [name for name in self._env.agents if not self._has_ended(name)]

    def reset(self, seed: int | None, options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        self._env.reset(seed=seed, options=options)
        return self._seen(self.agents), {}

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        env, playing = self._env, self.agents
        env.step(actions[env.agent_selection])
        rewards, infos = dict(env.rewards), dict(env.infos)
        ends, cuts = dict(env.terminations), dict(env.truncations)
        seen = self._seen(playing)
        while env.agents and self._has_ended(env.agent_selection):
            env.step(None)  # takes it out of the game
        return seen, rewards, ends, cuts, infos

    def _has_ended(self, name: str) -> bool:
        return bool(self._env.terminations[name] or self._env.truncations[name])

    def _seen(self, names: list[str]) -> dict[str, Any]:
        return {name: self._seen_by(name) for name in names}

    def _seen_by(self, name: str) -> dict[str, Any]:
        """Returns what an agent sees, which may only choose the action 0 unless it is its turn."""
        seen = dict(self._env.observe(name))
        mask = np.array(seen[MASK])
        if self._env.agent_selection != name or not mask.any():
            mask[:] = 0
            mask[0] = 1
        return {**seen, MASK: mask}
