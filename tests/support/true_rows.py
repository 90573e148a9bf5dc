# SPDX-License-Identifier: Apache-2.0
"""Environments that give random rows, kept as plain lists, and the rollouts cut from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.spaces import ArraySpec

NUM_ACTIONS = 3
BEGUN_WITH = -7  # the version that a later rollout notes in row 0
Batch = dict[str, Any]


@dataclass(eq=False)
class Row:
    """One row as the environment and the actor gave it, with a single frame."""

    frame: dict[str, np.ndarray]
    values: dict[str, Any]  # of one number each
    action: np.ndarray
    logits: np.ndarray
    final: dict[str, np.ndarray] | None  # the newest frame of a truncated episode

    @property
    def is_end(self) -> bool:
        return bool(self.values["done"] and self.values["episode_step"])


@dataclass(eq=False)
class Life:
    """All rows of one environment between two interruptions."""

    agent: int
    env_index: int
    first_index: int  # rollout_index of the first rollout
    rows: list[Row] = field(default_factory=list)

    def start(self, n: int) -> int:
        """The first row of the episode that row n belongs to."""
        return next(row for row in range(n, -1, -1) if row == 0 or self.rows[row].values["done"])

    def stack(self, n: int, k: int) -> dict[str, np.ndarray]:
        """The newest k frames of the episode, of which the first stands for those before it."""
        start = self.start(n)
        frames = [self.rows[max(n - age, start)].frame for age in reversed(range(k))]
        return {name: np.concatenate([frame[name] for frame in frames]) for name in frames[0]}

    def final_stack(self, n: int, k: int) -> dict[str, np.ndarray]:
        """The last k frames of the episode that was truncated at row n."""
        before, final = self.stack(n - 1, k), self.rows[n].final
        assert final is not None
        return {
            name: np.concatenate([before[name], final[name]])[len(final[name]) :] for name in final
        }


class Envs:
    """Environments of several agents, played as far as is asked."""

    def __init__(
        self, seed: int, unroll_length: int, k: int, ends: float = 0.15, late: bool = False
    ) -> None:
        """ends: the probability that a step ends an episode. late: episodes begin one step later,
        in a reset row.
        """
        self.late = late
        self.rng = np.random.default_rng(seed)
        self.unroll_length, self.k, self.ends = unroll_length, k, ends
        self.lives: dict[tuple[int, int], Life] = {}
        self.played: dict[tuple[int, int], int] = {}  # rollouts of the current life
        self.by_id: list[tuple[Life, int]] = []  # policy_version of a row -> the row

    def next_rollout(
        self, agent: int, env_index: int, interrupted: bool = False
    ) -> tuple[Life, int]:
        """Plays T more steps; interrupted: after a new start. Returns the life and first row."""
        key, T = (agent, env_index), self.unroll_length
        if key not in self.lives or interrupted:
            before = self.lives.get(key)
            index = 0 if before is None else before.first_index + self.played[key] + 1
            self.lives[key], self.played[key] = Life(agent, env_index, index), 0
            self._add_row(self.lives[key], first=True)
        life = self.lives[key]
        first = self.played[key] * T
        while len(life.rows) < first + T + 1:
            self._add_row(life)
        self.played[key] += 1
        return life, first

    def batch(self, rollouts: Sequence[tuple[Life, int]]) -> Batch:
        """The arrays of a batch of these rollouts."""
        arrays = empty_batch(self.unroll_length, len(rollouts), self.k)
        finals: list[dict[str, np.ndarray]] = []
        for column, (life, first) in enumerate(rollouts):
            finals += self.write(arrays, column, life, first)
            arrays["env_index"][:, column] = life.env_index
            arrays["rollout_index"][:, column] = life.first_index + first // self.unroll_length
            if first > 0:
                arrays["policy_version"][0, column] = BEGUN_WITH
        shapes = map_leaves(lambda leaf: leaf[0, :0], arrays["observation"])
        arrays["final_observation"] = {
            name: np.stack([final[name] for final in finals]) if finals else shapes[name]
            for name in shapes
        }
        return arrays

    def write(self, arrays: Batch, column: int, life: Life, first: int) -> list[Any]:
        """Writes T + 1 rows; returns the final observations in rows 1..T."""
        finals = []
        for t in range(self.unroll_length + 1):
            row = life.rows[first + t]
            for name, value in row.values.items():
                arrays[name][t, column] = value
            for name, stack in life.stack(first + t, self.k).items():
                arrays["observation"][name][t, column] = stack
            arrays["action"][t, column] = row.action
            arrays["extras"]["policy_logits"][t, column] = row.logits
            if t > 0 and row.final is not None:
                finals.append(life.final_stack(first + t, self.k))
        return finals

    def _frame(self) -> dict[str, np.ndarray]:
        return {
            "image": self.rng.integers(256, size=(1, 2, 3), dtype=np.uint8),
            "vector": self.rng.choice(np.array([0.5, -1.5, np.nan], np.float32), size=2),
        }

    def _add_row(self, life: Life, first: bool = False) -> None:
        first = first or (self.late and life.rows[-1].is_end)
        done = first or bool(self.rng.random() < self.ends)
        truncated = not first and done and bool(self.rng.random() < 0.5)
        values = {
            "reward": np.float32(self.rng.normal()),
            "done": done,
            "truncated": truncated,
            "episode_end": done and bool(self.rng.random() < 0.5),
            "episode_step": 0 if first else int(self.rng.integers(1, 1000)),
            "episode_return": np.float32(self.rng.normal()),
            "policy_version": len(self.by_id),
        }
        self.by_id.append((life, len(life.rows)))
        logits = self.rng.normal(size=NUM_ACTIONS).astype(np.float32)
        action = np.int64(self.rng.integers(NUM_ACTIONS))
        final = self._frame() if truncated else None
        life.rows.append(Row(self._frame(), values, action, logits, final))


def fields(unroll_length: int, columns: int, k: int) -> dict[str, Any]:
    """The arrays of a batch of such rows, as nests of ArraySpec."""

    def spec(shape: tuple[int, ...], dtype: str) -> ArraySpec:
        return ArraySpec((unroll_length + 1, columns, *shape), dtype)

    return {
        "observation": {"image": spec((k, 2, 3), "uint8"), "vector": spec((2 * k,), "float32")},
        "reward": spec((), "float32"),
        "done": spec((), "bool"),
        "truncated": spec((), "bool"),
        "episode_end": spec((), "bool"),
        "episode_step": spec((), "int32"),
        "episode_return": spec((), "float32"),
        "action": spec((), "int64"),
        "extras": {"policy_logits": spec((NUM_ACTIONS,), "float32")},
        "policy_version": spec((), "int64"),
        "env_index": spec((), "int64"),
        "rollout_index": spec((), "int64"),
        "initial_agent_state": (),
    }


def empty_batch(unroll_length: int, columns: int, k: int) -> Batch:
    """Arrays for a batch, of which every byte is 1."""

    def ones(spec: ArraySpec) -> np.ndarray:
        array = np.empty(spec.shape, spec.dtype)
        array.view(np.uint8)[...] = 1
        return array

    batch: Batch = map_leaves(ones, fields(unroll_length, columns, k))
    return batch
