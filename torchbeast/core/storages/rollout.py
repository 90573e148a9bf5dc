# SPDX-License-Identifier: Apache-2.0
"""A batch of rollouts: T steps of B environments, in T + 1 rows.

Row t holds the environments' outputs *after* an action, and the agent output that *produced* that
action: `action[t]` and `extras[...][t]` were computed from row t - 1's observation. Row 0 repeats
row T of the same environment's previous rollout; the agent output in an environment's very first
row 0 is a dummy. On a done row the observation is the next episode's first, while reward,
episode_step and episode_return still belong to the episode that ended.

`env_index` numbers the environments, `rollout_index` the rollouts of each. If two rollouts of an
environment have consecutive numbers, row 0 of the second repeats row T of the first. When an
environment restarts because its process died or its connection was lost, a number is skipped, so
that rollouts with consecutive numbers never have a gap between them. (env_index, rollout_index)
identifies a rollout of one source; another source, such as a resumed run's, counts from zero.

Columns may come from replay (`replayed`). Algorithms train on all columns alike, but replayed ones
belong to other batches too: only the others, called *online*, count as collected, report episodes
and enter running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchbeast.core.actors.contract import Agent, specs_of_extras
from torchbeast.core.base.nest import Nest, flatten, map_leaves
from torchbeast.core.envs.contract import is_reset
from torchbeast.core.envs.spaces import ArraySpec, num_bytes
from torchbeast.core.envs.tasks import TASK, has_tasks, tasks_in
from torchbeast.core.losses import Mean, both, mean
from torchbeast.core.storages.batch import Feedback, even_ranges, ignore

_NO_TENSORS = ("collected", "feeds_back", "give_feedback")


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A batch of rollouts, for algorithms that train on sequences: T steps of B environments.

    Row t holds what followed action t; the module's docstring describes rows and numbers.

    Attributes:
        observation: Leaves [T+1, B, *shape], with frames stacked.
        reward: float32 [T+1, B], unscaled.
        done: bool [T+1, B], terminated or truncated.
        episode_step: int32 [T+1, B], environment steps of the episode so far.
        episode_return: float32 [T+1, B], sum of unscaled rewards of the episode so far.
        action: Leaves [T+1, B, ...].
        extras: Outputs of acting by name, [T+1, B, ...], as Algorithm.needs lists them.
        initial_agent_state: Leaves [layers, B, hidden], the recurrent state for row 0; () when
            feed-forward.
        truncated: bool [T+1, B], cut by a time limit.
        episode_end: bool [T+1, B], the whole game is over, not only a life.
        policy_version: int64 [T+1, B], version of the weights that acted.
        final_observation: Leaves [K, *shape], the last observations of the K truncated episodes, in
            the order of truncations().
        env_index: int64 [T+1, B], number of the environment, the same in all rows.
        rollout_index: int64 [T+1, B], number of its rollout, the same in all rows.
        info: float32 [T+1, B] by keyword, numbers in the info of a game's last step; NaN where no
            game ended, or a game gave none.
        valid: bool [T+1, B], whether to train on the step to row t, see without_resets. None: all
            are valid.
        replayed: bool [T+1, B], whether a column comes from replay, the same in all rows. None:
            none.
        weights: float32 [T+1, B], importance-sampling weights of the losses, the same in all rows.
            The replay then needs new priorities as Feedback. None: all 1.
        collected: Steps that no other batch counts. None: all online steps.
        feeds_back: Whether a replay needs Feedback.final_state for the rollouts that follow these.
        give_feedback: Takes the Feedback of the update.
    """

    observation: Nest[Tensor]
    reward: Tensor
    done: Tensor
    episode_step: Tensor
    episode_return: Tensor
    action: Nest[Tensor]
    extras: dict[str, Tensor]
    initial_agent_state: Nest[Tensor]
    truncated: Tensor
    episode_end: Tensor
    policy_version: Tensor
    final_observation: Nest[Tensor]
    env_index: Tensor
    rollout_index: Tensor
    info: dict[str, Tensor] = field(default_factory=dict)
    valid: Tensor | None = None
    replayed: Tensor | None = None
    weights: Tensor | None = None
    collected: int | None = None
    feeds_back: bool = False
    give_feedback: Callable[[Feedback], None] = ignore

    @property
    def unroll_length(self) -> int:
        """The number of steps, T."""
        return self.reward.shape[0] - 1

    @property
    def batch_size(self) -> int:
        """The number of rollouts, B."""
        return self.reward.shape[1]

    @property
    def num_steps(self) -> int:
        """Number of steps to learn from: T * B, or the valid ones."""
        if self.valid is not None:
            return int(self.valid[1:].sum())
        return self.unroll_length * self.batch_size

    @property
    def env_steps(self) -> int:
        """Number of newly collected steps, valid or not."""
        if self.collected is not None:
            return self.collected
        if self.replayed is not None:
            return int((~self.replayed[1:].bool()).sum())
        return self.unroll_length * self.batch_size

    @property
    def tasks(self) -> Tensor:
        """int64 [T+1, B], the number of each row's task; 0 if there is one task."""
        if not has_tasks(self.observation):
            return torch.zeros_like(self.env_index)
        tasks: Tensor = tasks_in(self.observation)
        return tasks.long()

    @property
    def column_bytes(self) -> int:
        """Bytes of observations per column."""
        return sum(leaf[:, 0].nbytes for leaf in flatten(self.observation))

    def new_observations(self) -> Nest[Tensor]:
        """Returns leaves [T, B, *shape] of rows 1..T; row 0 belongs to the previous rollout. With a
        mask, or replayed columns, leaves [1, N, *shape] of the rows of valid online steps.
        """
        mask = self.online_mask

        def new(leaf: Tensor) -> Tensor:
            return leaf[1:] if mask is None else leaf[1:][mask].unsqueeze(0)

        return map_leaves(new, self.observation)

    def lags(self, version: int) -> dict[str, float]:
        """Returns the policy lag of the valid steps, in versions.

        The lag of a step is `version` minus the version of the weights that chose its action.

        Args:
            version: The present version of the weights.

        Returns:
            mean_lag and max_lag of the online steps, and replay_age, the mean lag of the replayed
            ones; each only if there are such steps.
        """
        lags = (version - self.policy_version[1:]).float()
        online, replayed = self.online_mask, self.replayed_mask
        metrics = {}
        if (own := lags if online is None else lags[online]).numel():
            metrics = {"mean_lag": own.mean().item(), "max_lag": own.max().item()}
        if replayed is not None and replayed.any():
            metrics["replay_age"] = lags[replayed].mean().item()
        return metrics

    @property
    def mask(self) -> Tensor | None:
        """[T, B] bool: which of the steps to rows 1..T to train on; None: all."""
        return None if self.valid is None else self.valid[1:].bool()

    @property
    def online_mask(self) -> Tensor | None:
        """[T, B] bool: which of the steps to train on are not replayed; None: all."""
        if self.replayed is None:
            return self.mask
        return both(self.mask, ~self.replayed[1:].bool())

    @property
    def replayed_mask(self) -> Tensor | None:
        """[T, B] bool: which of the steps to train on are replayed; None: none."""
        if self.replayed is None:
            return None
        return both(self.mask, self.replayed[1:].bool())

    def without_resets(self) -> Rollout:
        """Returns a rollout in which the steps to reset rows are not valid, see VecStep.resets.

        Such a row looks like the first row of an environment: it is done, in step 0 of its episode.
        """
        if not (resets := is_reset(self.done, self.episode_step))[1:].any():
            return self
        return self.keeping(~resets)

    def keeping(self, valid: Tensor) -> Rollout:
        """Returns a rollout in which only some steps are valid and count as collected.

        Args:
            valid: bool [T+1, B], whether to keep the step to row t.
        """
        kept = replace(self, valid=both(self.valid, valid))
        online = kept.online_mask
        return replace(kept, collected=None if online is None else int(online.sum()))

    def without_older(self, version: int) -> tuple[Rollout, Mean]:
        """Returns a rollout in which online steps that weights before this version chose are not
        valid but still count as collected, and the share of the online steps that they are.
        """
        older = self.policy_version < version
        if self.replayed is not None:
            older = older & ~self.replayed.bool()
        share = mean(older[1:].float(), self.online_mask)
        if not older[1:].any():  # a mask would make every later count wait for the device
            return self, share
        return replace(self, valid=both(self.valid, ~older), collected=self.env_steps), share

    def with_extras(self, **of_steps: Tensor) -> Rollout:
        """Returns a rollout with more extras, which get a row 0 of zeros.

        Args:
            **of_steps: [T, B] by name, of the actions that led to rows 1..T.
        """
        more = {name: F.pad(leaf, (0, 0, 1, 0)) for name, leaf in of_steps.items()}
        return replace(self, extras=self.extras | more)

    def map(self, function: Callable[[Tensor], Tensor]) -> Rollout:
        """Returns a rollout with function(tensor) in place of every tensor.

        Args:
            function: Called with each tensor, for example to move it to a device.
        """
        return replace(self, **map_leaves(function, self.tensors()))

    def split(self, max_columns: int) -> list[Rollout]:
        """Returns slices of nearly equal size, which share memory.

        If `collected` is given, the first slice has all of it.

        Args:
            max_columns: The most columns of a slice.
        """
        if max_columns >= self.batch_size:
            return [self]
        finals, ranges = self._first_finals(), even_ranges(self.batch_size, max_columns)
        return [self._columns(start, end, finals) for start, end in ranges]

    def columns(self, start: int, end: int) -> Rollout:
        """Returns some of the columns, which share memory. It reads no later column.

        Args:
            start: The first column.
            end: The column after the last.
        """
        return self._columns(start, end, self._first_finals())

    def take(self, which: Tensor) -> Rollout:
        """Returns copies of some columns, which count as learnt steps but not as collected ones.

        Args:
            which: int64 [N], the columns in their new order.
        """
        rows = torch.arange(len(self.reward), device=which.device)
        taken = self._gathered(
            rows.unsqueeze(1).expand(-1, len(which)), which.expand(len(rows), -1)
        )
        state = map_leaves(lambda leaf: leaf[:, which], self.initial_agent_state)
        return replace(taken, initial_agent_state=state)

    def take_steps(self, which: Tensor) -> Rollout:
        """Returns copies of single steps as columns of two rows, which count as learnt steps but
        not as collected ones.

        It is for feed-forward networks only: the state of a recurrent one, which is known for row 0
        alone, is left out.

        Args:
            which: int64 [N]; number t * B + b is the step from row t to row t + 1 of column b.

        Returns:
            A rollout of shape [2, N].
        """
        rows, columns = which.div(self.batch_size, rounding_mode="floor"), which % self.batch_size
        return self._gathered(torch.stack([rows, rows + 1]), torch.stack([columns, columns]))

    def _gathered(self, rows: Tensor, columns: Tensor) -> Rollout:
        """Returns new columns, row by row from these places [R, N], without a recurrent state."""
        parts = self.tensors()
        final = parts.pop("final_observation")
        del parts["initial_agent_state"]
        here = self._finals_at(rows[1:], columns[1:])
        places = rows * self.batch_size + columns
        return Rollout(
            **map_leaves(lambda leaf: _at(leaf, places, rows, columns), parts),
            final_observation=map_leaves(lambda leaf: leaf[here], final),
            initial_agent_state=(),
            collected=0,
        )

    def _finals_at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Returns the numbers of the final observations at these places, column by column."""
        if all(len(leaf) == 0 for leaf in flatten(self.final_observation)):
            return rows.new_empty(0)
        finals = self._final_numbers[rows, columns].T
        return finals[finals >= 0]

    @cached_property  # many minibatches are taken from a batch
    def _final_numbers(self) -> Tensor:
        """int64 [T+1, B], the number of each row's final observation; -1: it has none."""
        numbers, cuts = torch.full_like(self.env_index, -1), self.truncations()
        numbers[cuts] = torch.arange(len(cuts[0]), device=numbers.device)
        return numbers

    def _first_finals(self) -> list[int]:
        """Returns where the final observations of each column begin, and behind the last's."""
        return [0, *self.truncated[1:].sum(0).cumsum(0).tolist()]

    def _columns(self, start: int, end: int, finals: list[int]) -> Rollout:
        """Returns columns start..end-1; column i's final observations begin at finals[i]."""
        parts = self.tensors()
        final = parts.pop("final_observation")  # has no columns
        parts = map_leaves(lambda leaf: leaf[:, start:end], parts)
        # An LSTM needs a contiguous state.
        parts["initial_agent_state"] = map_leaves(Tensor.contiguous, parts["initial_agent_state"])
        here = slice(finals[start], finals[end])
        parts["final_observation"] = map_leaves(lambda leaf: leaf[here], final)
        collected = None if self.collected is None else self.collected if start == 0 else 0
        return replace(self, **parts, collected=collected)

    def tensors(self) -> dict[str, Any]:
        """Returns all fields that consist of tensors, by name, except those that are None."""
        named = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_TENSORS}
        return {name: nest for name, nest in named.items() if nest is not None}

    def truncations(self) -> tuple[Tensor, Tensor]:
        """Returns rows and columns [K] of the truncations in rows 1..T, by column, then row."""
        columns, rows = self.truncated[1:].T.nonzero(as_tuple=True)
        return rows + 1, columns

    def finished_episodes(self) -> tuple[list[float], list[int]]:
        """Returns the returns and lengths of games that ended in the valid online steps."""
        ended = self._ended
        return self.episode_return[1:][ended].tolist(), self.episode_step[1:][ended].tolist()

    def finished_info(self) -> dict[str, list[float]]:
        """Returns the numbers of these games by keyword, NaN where one gave none; and those of
        their tasks, if there are several.
        """
        tasks = {TASK: self.tasks} if has_tasks(self.observation) else {}
        numbers = {**self.info, **tasks}
        return {name: rows[1:][self._ended].tolist() for name, rows in numbers.items()}

    @property
    def _ended(self) -> Tensor:
        """[T, B] bool: where a game ended in a valid online step."""
        ended = self.episode_end[1:].bool()
        return ended if self.online_mask is None else ended & self.online_mask


def _at(leaf: Tensor, places: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Returns a leaf [T+1, B, ...] at rows and columns [R, N], as [R, N, ...].

    places: rows * B + columns. With them a contiguous leaf takes a third of the time.
    """
    if not leaf.is_contiguous():
        return leaf[rows, columns]
    chosen = leaf.flatten(0, 1).index_select(0, places.flatten())
    return chosen.view(*places.shape, *leaf.shape[2:])


class RolloutSpec(NamedTuple):
    """The contents and the length of an agent's rollouts.

    Attributes:
        agent: The agent that acts.
        extras: Names of the outputs of acting to keep with the actions.
        unroll_length: T, the number of steps.
        info_keywords: See VecEnv.create_factory.
    """

    agent: Agent
    extras: Sequence[str]
    unroll_length: int
    info_keywords: Sequence[str] = ()

    def fields(self, columns: int = 1) -> dict[str, Any]:
        """Returns a nest of ArraySpec `[T+1, columns, ...]` for every field of Rollout except
        final_observation, which has a row for each truncation.
        """

        def spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
            return ArraySpec((self.unroll_length + 1, columns, *shape), dtype)

        actor, space = self.agent.model, self.agent.observation_space
        action = actor.distribution.zero_action((1, columns))
        given = specs_of_extras(actor, self.extras)
        return {
            "observation": map_leaves(lambda leaf: spec(leaf.shape, leaf.dtype), space),
            "reward": spec((), "float32"),
            "done": spec((), "bool"),
            "truncated": spec((), "bool"),
            "episode_end": spec((), "bool"),
            "episode_step": spec((), "int32"),
            "episode_return": spec((), "float32"),
            "action": map_leaves(lambda leaf: spec(leaf.shape[2:], _dtype(leaf)), action),
            "extras": map_leaves(lambda leaf: spec(leaf.shape, leaf.dtype), given),
            "policy_version": spec((), "int64"),
            "env_index": spec((), "int64"),
            "rollout_index": spec((), "int64"),
            "info": {name: spec((), "float32") for name in self.info_keywords},
            "initial_agent_state": map_leaves(
                lambda leaf: ArraySpec(tuple(leaf.shape), _dtype(leaf)),
                actor.initial_state(columns),
            ),
        }

    def num_bytes(self, columns: int = 1) -> int:
        """Returns the bytes of a batch of rollouts, without final observations."""
        return num_bytes(self.fields(columns))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")  # of a GPU's tensors too
