# SPDX-License-Identifier: Apache-2.0
"""One agent for many tasks: environments that are dealt to tasks, and step together.

    environment   0  1  2  3  4         three tasks in equal shares
    task          0  1  2  0  1

With several tasks, every observation is a dict whose entry TASK is the number of the task, counted
from 0. So rollouts, replays and messages carry it like any other entry. Networks do not see it;
which head gives the value, and the statistics of PopArt, depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from torchbeast.core.base.nest import flatten, map_leaves, pack_as
from torchbeast.core.envs import contract
from torchbeast.core.envs.spaces import ArrayNest, ArraySpec
from torchbeast.core.envs.sync_vec_env import environment_seeds
from torchbeast.core.envs.vec_env import VecEnv
from torchbeast.errors import UsageError

TASK = "torchbeast:task"
"""The entry of an observation with the number of its task, int32 [1], or [k] in a stack of k. No
environment has an entry of this name.
"""

_SEEN = "task_input"  # the same, where networks see it
_ONLY = "observation"  # the entry of the task's own observation, unless that is a dict itself


def without_task(observation: Any) -> Any:
    """Returns an observation, or its space, as networks see it."""
    if not has_tasks(observation):
        return observation
    rest = {name: entry for name, entry in observation.items() if name != TASK}
    return rest[_ONLY] if rest.keys() == {_ONLY} else rest


def with_task(observation: Any, number: Any, is_seen: bool = False) -> dict[str, Any]:
    """Returns an observation that carries the number of its task, or a space that does.

    Args:
        observation: Leaves [E, ...]; or a space.
        number: int32 [E, 1]; or a space.
        is_seen: Whether networks see the number too.
    """
    entries = observation if isinstance(observation, dict) else {_ONLY: observation}
    return {**entries, TASK: number, **({_SEEN: number} if is_seen else {})}


def has_tasks(observation: Any) -> bool:
    """Returns whether an observation, or its space, carries the number of its task."""
    return isinstance(observation, dict) and TASK in observation


def num_tasks(space: Any) -> int:
    """Returns the number of tasks of an observation space."""
    count: int = space[TASK].categories[0] if has_tasks(space) else 1
    return count


def tasks_in(observation: Any) -> Any:
    """Returns the numbers of the tasks, int32 [...], of observations [...] that carry them.

    A peer may send any numbers.
    """
    return observation[TASK][..., -1]


def dealt(shares: Sequence[float], first: int, count: int) -> list[int]:
    """Returns how many of the environments first, ..., first + count - 1 each task has.

    Each environment in turn is dealt to the task that lacks most of its share of those before it.
    Counts as shares give these counts.

    Args:
        shares: Of the tasks; their sum is above 0.
        first: Number of the first environment.
        count: Number of environments.
    """
    counts, tasks = [0] * len(shares), []
    for number in range(1, first + count + 1):
        pairs = zip(shares, counts, strict=True)
        lacking = [share * number - have * sum(shares) for share, have in pairs]
        tasks.append(lacking.index(max(lacking)))
        counts[tasks[-1]] += 1
    return [tasks[first:].count(task) for task in range(len(shares))]


class TasksEnv(contract.OwnVecEnv):
    """A VecEnv of environments of several tasks, those of each task side by side.

    Attributes:
        spec: The spec of the environments, if `envs.make` made them.
    """

    spec: Any

    def __init__(self, parts: Mapping[int, VecEnv], names: Sequence[str], is_seen: bool) -> None:
        """Joins environments, which it closes.

        parts: environments by the number of their task, at least one. names: of all tasks. is_seen:
        whether networks see the number of the task. Raises UsageError if one network cannot serve
        the tasks.
        """
        self._parts, self._is_seen = parts, is_seen
        self.env_id = ",".join(names)
        self.num_envs = sum(part.num_envs for part in parts.values())
        for number, part in parts.items():
            if getattr(part, "num_agents", 1) > 1:
                raise UsageError(
                    f"{names[number]} is a game of several agents, which cannot be one of several "
                    "tasks: train on it alone"
                )
        (number, first), *others = parts.items()
        for other, part in others:
            for what in ("observation_space", "action_space", "frame_stack"):
                ours, theirs = getattr(first, what), getattr(part, what)
                if ours != theirs:
                    raise UsageError(
                        f"one agent needs tasks of equal spaces, but the {what} of {names[number]} "
                        f"is {ours}, and that of {names[other]} {theirs}: choose other tasks, with "
                        "full_action_space for Atari games, and ids with -v0 for MinAtar"
                    )
        spec = ArraySpec((1,), "int32", categories=(len(names),))
        self.observation_space = with_task(first.observation_space, spec, is_seen)
        self.action_space, self.frame_stack = first.action_space, first.frame_stack

    def reset(self, seed: int) -> ArrayNest:
        seeds = environment_seeds(seed, len(self._parts))
        parts = zip(self._parts.items(), seeds, strict=True)
        return _joined([self._numbered(n, part.reset(own)) for (n, part), own in parts])

    def step(self, action: ArrayNest) -> contract.VecStep:
        if (count := len(flatten(action)[0])) != self.num_envs:
            raise ValueError(f"expected actions of {self.num_envs} environments, got {count}")
        steps = []
        for number, part, here in self._places():
            step = part.step(map_leaves(itemgetter(here), action))
            final, nothing = step.final_observation, np.zeros(part.num_envs, bool)
            numbered = step._replace(
                observation=self._numbered(number, step.observation),
                final_observation=None if final is None else self._numbered(number, final),
                resets=nothing if step.resets is None else step.resets,
            )
            steps.append(numbered)
        finals = [s.final_observation for s in steps if s.final_observation is not None]
        joined = contract.VecStep(*_joined([step._replace(final_observation=()) for step in steps]))
        return joined._replace(final_observation=_joined(finals) if finals else None)

    @property
    def final_info(self) -> dict[int, Mapping[str, Any]]:
        """The infos of games that ended, of the tasks that give some."""
        return {
            here.start + index: info
            for _, part, here in self._places()
            for index, info in contract.final_info_of(part).items()
        }

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Gives all environments options of their next resets."""
        for part in self._parts.values():
            contract.give_options(part, options)

    def render(self) -> np.ndarray | None:
        """Returns a picture of the first environment, if it renders one."""
        return contract.picture_of(next(iter(self._parts.values())))

    def close(self) -> None:
        for part in self._parts.values():
            part.close()

    def _places(self) -> Iterator[tuple[int, VecEnv, slice]]:
        """Yields the number of each task, its environments, and which of all they are."""
        start = 0
        for number, part in self._parts.items():
            yield number, part, slice(start, start + part.num_envs)
            start += part.num_envs

    def _numbered(self, number: int, observation: ArrayNest) -> ArrayNest:
        count = len(flatten(observation)[0])
        return with_task(observation, np.full((count, 1), number, np.int32), self._is_seen)


def _joined(nests: Sequence[Any]) -> Any:
    """Returns a nest of leaves [E, ...] side by side."""
    leaves = zip(*map(flatten, nests), strict=True)
    return pack_as(nests[0], [np.concatenate(parts) for parts in leaves])
