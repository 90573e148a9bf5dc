# SPDX-License-Identifier: Apache-2.0
"""Games of several agents, of PettingZoo's interfaces, as a VecEnv in which each agent is an
environment.

    column   0  1  2    3  4  5    6  7          two games of three agents; columns 6 and 7
    game     0  0  0    1  1  1    -  -          cannot hold a whole game, and stay idle
    agent    a  b  c    a  b  c    -  -

All agents have one policy. An agent's episode begins when the agent joins the game's list `agents`,
and ends when the game reports that it terminated or was truncated, or removes it from `agents`,
which counts as terminated. Outside its episode an agent has rows of VecStep.resets, from which
nothing learns. The next game begins when no agent has an episode. docs/how-to/several-agents.md
has the table of cases. An agent's share of a step is read like SyncVecEnv's steps, by `read_step`.

In a game of turns every agent has a row in every turn. An agent that waits may only choose the
action 0, by its action mask, and the game ignores it: such a step changes no policy, because its
probability is 1.

PettingZoo is imported only to convert its own environments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten, map_leaves, pack_as
from torchbeast.core.envs import spaces, sync_vec_env
from torchbeast.core.envs.contract import MASK, FiniteCheck, VecStep
from torchbeast.errors import UsageError, as_usage_error

_log = logging.getLogger("torchbeast.agents")


def has_agents(env: Any) -> bool:
    """Returns whether this is an environment of several agents, with a space for each."""
    return callable(getattr(env, "action_space", None))


class AgentsEnv(sync_vec_env.PythonVecEnv):
    """The agents of several games, each a column of num_envs.

    Attributes:
        began: bool [games], the games that began in the last step, or in `reset`.
    """

    _kind = "game"

    def __init__(
        self, first: Any, make_game: Callable[[], Any], num_envs: int, env_id: str
    ) -> None:
        """Makes as many whole games as there are columns for, the first one already made.

        Raises UsageError for games that one policy cannot play.
        """
        self.env_id, self.num_envs, self._make_game = env_id, num_envs, make_game
        self._names = list(first.possible_agents)
        self.num_agents = len(self._names)
        self._envs = [first, *(make_game() for _ in range(1, num_envs // self.num_agents))]
        self._games = [_parallel(env, env_id) for env in self._envs]
        observation, action = _spaces(self._games[0], self._names, env_id)
        with as_usage_error(env_id):
            self.observation_space = spaces.observation_spec(observation)
            self.action_space = spaces.from_gymnasium(action)
        space = self.observation_space
        named = sorted(space.items()) if isinstance(space, dict) else [("", space)]
        # Observations of idle agents, leaves [E, ...]: zeros, and a mask that allows all actions.
        self._of_idle = [
            np.full((num_envs, *spec.shape), int(name == MASK), spec.dtype)
            for name, part in named
            for spec in flatten(part)
        ]
        self._check_finite = FiniteCheck(space)
        self._steps = [0] * len(self._games)
        self.began = np.zeros(len(self._games), bool)
        self._listed = np.zeros(num_envs, bool)  # agents that their game had in `agents`
        self._plays = np.zeros(num_envs, bool)  # and whose episode has not ended

    def resized(self, num_envs: int) -> AgentsEnv:
        """Returns the same games for another number of columns, in place of these."""
        return AgentsEnv(self._envs[0], self._make_game, num_envs, self.env_id)

    def reset(self, seed: int) -> spaces.ArrayNest:
        if self.num_envs < self.num_agents:
            raise UsageError(
                f"{self.env_id} has {self.num_agents} agents, each of which counts as an "
                f"environment, got {self.num_envs} environments: give every process that steps "
                f"environments a multiple of {self.num_agents}, for example num_envs "
                f"{4 * self.num_agents} with num_workers 2 (num_servers in PolyBeast)"
            )
        if idle := self.num_envs % self.num_agents:
            _log.warning(
                "%d of the %d environments of a process stay idle, because a game of %s has %d "
                "agents: give every process a multiple of this",
                *(idle, self.num_envs, self.env_id, self.num_agents),
            )
        rows = [row.copy() for row in self._of_idle]
        self.final_info = {}
        for number, game_seed in enumerate(sync_vec_env.environment_seeds(seed, len(self._games))):
            self._begin(number, game_seed, rows)
        return self._checked(rows)

    def step(self, action: spaces.ArrayNest) -> VecStep:
        rows, before = [row.copy() for row in self._of_idle], self._plays.copy()
        reward = np.zeros(self.num_envs, np.float32)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        finals: list[list[np.ndarray]] = []
        self.final_info = infos = {}
        self.began[:] = False
        actions = sync_vec_env.in_bounds(self.action_space, action, self.num_envs)
        for number in range(len(self._games)):
            for column, is_there, step_of_agent in self._play(number, actions):
                seen, gained, over, cut, info = step_of_agent
                self._plays[column] = goes_on = is_there and not over and not cut
                if goes_on:
                    self._write(rows, column, seen)
                if not before[column]:
                    continue  # it joins
                reward[column] = gained
                terminated[column], truncated[column] = not goes_on and not cut, cut
                if cut:
                    finals.append(self._final(column, seen))
                if not goes_on:
                    infos[column] = dict(info)
            if not self._plays[list(self._columns(number).values())].any():
                self._begin(number, None, rows)
        last = [np.stack(leaf) for leaf in zip(*finals, strict=True)]
        final = pack_as(self.observation_space, last) if finals else None
        ended, resets = terminated | truncated, ~before
        seen = self._checked(rows)
        return VecStep(seen, reward, terminated | resets, truncated, ended, final, resets)

    def _columns(self, number: int) -> dict[str, int]:
        """Returns the column of each agent of a game."""
        first = number * self.num_agents
        return {name: first + index for index, name in enumerate(self._names)}

    def _begin(self, number: int, seed: int | None, rows: list[np.ndarray]) -> None:
        """Starts a game, and writes the first observations of its agents."""
        seen = sync_vec_env.reset_one(self._games[number], seed, self._options)
        self._steps[number], self.began[number] = 0, True
        agents = self._agents(number)
        for name, column in self._columns(number).items():
            self._plays[column] = self._listed[column] = name in agents
            if name in agents:
                self._write(rows, column, seen.get(name))

    def _play(
        self, number: int, actions: spaces.ArrayNest
    ) -> Iterator[tuple[int, bool, tuple[Any, float, bool, bool, Mapping[str, Any]]]]:
        """Steps a game by actions, leaves [E, ...]. Yields the column of each agent that has an
        episode or joins, whether the agent is in the game's list, and what it got, see read_step.
        """
        columns, listed = self._columns(number), self._listed
        by_agent = {
            name: map_leaves(itemgetter(column), actions)
            for name, column in columns.items()
            if listed[column]
        }
        result = self._games[number].step(by_agent)
        self._steps[number] += 1
        sync_vec_env.check_step(result, self._where_in, number)
        *parts, infos = result
        parts.append(infos if isinstance(infos, Mapping) else {})
        agents = self._agents(number)
        for name, column in columns.items():
            is_there = name in agents
            joins, listed[column] = is_there and not listed[column], is_there
            if self._plays[column] or joins:
                step_of_agent = _of_agent(name, parts, is_there and not joins)
                yield column, is_there, sync_vec_env.read_step(step_of_agent, self._where, column)

    def _agents(self, number: int) -> set[str]:
        """Returns the agents that a game has now."""
        return set(getattr(self._games[number], "agents", None) or ())

    def _write(self, rows: list[np.ndarray], column: int, seen: Any) -> None:
        """Writes the observation of an agent that continues."""
        for row, leaf in zip(rows, self._leaves(column, seen), strict=True):
            row[column] = leaf

    def _final(self, column: int, seen: Any) -> list[np.ndarray]:
        """Returns copies of the leaves of the last observation of an episode that is cut."""
        final = [np.array(leaf) for leaf in self._leaves(column, seen)]
        self._check_finite([leaf[None] for leaf in final], lambda _: self._where(column))
        return final

    def _leaves(self, column: int, seen: Any) -> Iterator[np.ndarray]:
        path = f"{self._where(column)}: observation"
        return spaces.matching_leaves(self.observation_space, seen, path)

    def _checked(self, rows: list[np.ndarray]) -> spaces.ArrayNest:
        self._check_finite(rows, self._where)
        return pack_as(self.observation_space, rows)

    def _where(self, column: int) -> str:
        number, index = divmod(column, self.num_agents)
        return f"agent {self._names[index]} of {self._where_in(number)}"

    def _where_in(self, number: int) -> str:
        return f"{self._name(number)}, step {self._steps[number]}"


def _of_agent(name: str, parts: Sequence[Mapping[str, Any]], is_needed: bool) -> tuple[Any, ...]:
    """Returns an agent's values of a step. One that is missing is None, which read_step refuses as
    a reward or an end, or, unless it is needed, 0 or False.
    """
    nothing = [None, 0.0, *[False] * (len(parts) - 3), None]
    values = []
    for part, default in zip(parts, nothing, strict=True):
        try:
            values.append(part[name])  # of a defaultdict, too
        except KeyError:
            values.append(None if is_needed else default)
    return tuple(values)


def _spaces(game: Any, names: list[str], env_id: str) -> tuple[Any, Any]:
    """Returns the observation and action spaces that all agents have."""
    by_agent = [(game.observation_space(name), game.action_space(name)) for name in names]
    for name, both in zip(names, by_agent, strict=True):
        for what, space, first in zip(("observation", "action"), both, by_agent[0], strict=True):
            if space != first:
                raise UsageError(
                    f"{env_id}: one policy plays all agents, so they need equal spaces, but the "
                    f"{what} space of {names[0]} is {first}, and {name} has {space}: pad "
                    "them in a wrapper, for example one of SuperSuit's"
                )
    return by_agent[0]


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
        self.env = env
        self.possible_agents = list(env.possible_agents)
        for name in self.possible_agents:
            action = spaces.from_gymnasium(env.action_space(name))
            parts = getattr(env.observation_space(name), "spaces", None)
            if not isinstance(action, spaces.Discrete) or MASK not in (parts or {}):
                raise UsageError(
                    f"{env_id}: a game of turns needs Discrete actions and observations that are "
                    f"dicts with an {MASK}, so that agents can wait for their turn; agent {name} "
                    f"has {env.action_space(name)} and {env.observation_space(name)}"
                )
        self.observation_space, self.action_space = env.observation_space, env.action_space

    @property
    def agents(self) -> list[str]:
        """The agents that have not ended."""
        ends = self._ends()
        return [n for n in self.env.agents if not any(by_agent.get(n) for by_agent in ends)]

    def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        sync_vec_env.reset_one(self.env, seed, options or {})
        self._go_on()
        return self._seen(self.agents)

    def step(self, actions: Mapping[str, Any]) -> tuple[Any, ...]:
        env, playing = self.env, self.agents
        env.step(actions[env.agent_selection])
        rewards, infos = dict(env.rewards), dict(getattr(env, "infos", {}))
        ends = [dict(by_agent) for by_agent in self._ends()]
        last = self._seen([n for n in playing if n in env.agents and n not in self.agents])
        self._go_on()
        return {**last, **self._seen(self.agents)}, rewards, *ends, infos

    def _ends(self) -> list[Mapping[str, Any]]:
        """Returns terminations and truncations, or the `dones` of PettingZoo's older interface."""
        env = self.env
        is_new = hasattr(env, "terminations")
        return [env.terminations, env.truncations] if is_new else [env.dones]

    def _go_on(self) -> None:
        """Takes agents that have ended out of the game until it is the turn of another one. Where
        all have ended, the next game begins anyway.
        """
        for _ in self.possible_agents:
            if self.env.agent_selection in (agents := self.agents) or not agents:
                return
            self.env.step(None)

    def _seen(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._seen_by(name) for name in names}

    def _seen_by(self, name: str) -> Any:
        """Returns what an agent sees, which may only choose the action 0 unless it is its turn."""
        seen = self.env.observe(name)
        if not isinstance(seen, Mapping) or MASK not in seen:
            return seen  # AgentsEnv refuses it
        mask = np.array(seen[MASK])
        if self.env.agent_selection != name or not mask.any():
            mask[:] = 0
            mask[0] = 1
        return {**seen, MASK: mask}
