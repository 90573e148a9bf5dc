# SPDX-License-Identifier: Apache-2.0
"""Environments whose observations have every kind of leaf and known numbers.

Named `assorted:NAME`, also in processes that a test starts: see NESTS and BARE.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces as gym_spaces

from torchbeast.core.base.nest import flatten, map_leaves
from torchbeast.core.envs.spaces import WIRE_DTYPES
from torchbeast.core.storages.rollout import Rollout

SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 3), (2, 3, 4), (1, 2, 3, 2), (0,), (2, 0, 3)]
KINDS = [(dtype, shape) for dtype in sorted(WIRE_DTYPES) for shape in SHAPES]
# Lengths of an environment's episodes, in turn, and whether a time limit cuts them.
EPISODES = [(3, False), (5, True), (1, True), (4, True)]


def leaf(dtype: str, shape: tuple[int, ...], time: int) -> np.ndarray:
    """Returns an array of this kind for a step of an episode; its entries count up."""
    entries = np.arange(np.prod(shape, dtype=int)).reshape(shape) + time
    if dtype == "bool":
        return entries % 2 == 1
    negative = np.dtype(dtype).kind in "if"
    return (entries - 20 if negative else entries).astype(dtype)


def _every_kind(time: int) -> dict[str, np.ndarray]:
    """Returns one array of each kind, by name."""
    return {f"{dtype} {shape}": leaf(dtype, shape, time) for dtype, shape in KINDS}


def _image_and_number(time: int) -> dict[str, Any]:
    return {"image": leaf("uint8", (4, 6, 6), time), "number": leaf("float32", (), time)}


def _deep(time: int) -> Any:
    """Returns tuples in dicts in tuples, and Python numbers."""
    grid, bit = leaf("int16", (2, 2), time), leaf("bool", (), time)
    return {"a": (grid, {"b": (bit,), "time": time}), "half": leaf("float16", (3,), time)}


def _pair(time: int) -> Any:
    return leaf("uint8", (5, 5, 3), time), leaf("int64", (), time)


NESTS: dict[str, Callable[[int], Any]] = {
    "every_kind": _every_kind,
    "image_and_number": _image_and_number,
    "deep": _deep,
    "pair": _pair,
}
BARE: dict[str, Callable[[int], Any]] = {  # such as "uint8_2x3", and "float64_" for a number
    f"{dtype}_{'x'.join(map(str, shape))}": functools.partial(leaf, dtype, shape)
    for dtype, shape in KINDS
}


class Assorted:
    """Gymnasium's interface. `observe(time)` is what it shows at that step of an episode.

    cuts: whether episodes may end by a time limit.
    """

    action_space = gym_spaces.Discrete(3)

    def __init__(self, observe: Callable[[int], Any], cuts: bool = True) -> None:
        self._observe = observe
        self._cuts = cuts
        self._episodes = itertools.cycle(EPISODES)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._time = 0
        self._length, self._cut = next(self._episodes)
        return self._observe(0), {}

    def step(self, action: Any) -> tuple[Any, ...]:
        self._time += 1
        over, cut = self._time == self._length, self._cut and self._cuts
        return self._observe(self._time), 1.0, over and not cut, over and cut, {}


def __getattr__(name: str) -> Callable[[], Assorted]:
    """Returns the factory of an environment with these observations."""
    observations = NESTS | BARE
    if name not in observations:
        raise AttributeError(name)
    return functools.partial(Assorted, observations[name])


def check_rollout(rollout: Rollout) -> None:
    """All shapes of a rollout agree, and a column is from replay in all rows or in none."""
    shape = rollout.reward.shape
    assert len(shape) == 2 and shape[0] > 1
    for name in _LEADING:
        for array in flatten(getattr(rollout, name)):
            assert array.shape[:2] == shape, name
    for name in _FLAT:
        for array in flatten(getattr(rollout, name)):
            assert array is None or array.shape == shape, name
    for state in flatten(rollout.initial_agent_state):
        assert state.dim() >= 2 and state.shape[1] == rollout.batch_size
    count = int(rollout.truncated[1:].sum())
    finals, seen = flatten(rollout.final_observation), flatten(rollout.observation)
    assert len(finals) == len(seen) or not count
    for final, leaf in zip(finals, seen, strict=False):
        assert final.shape == (count, *leaf.shape[2:])
    if rollout.replayed is not None:
        assert (rollout.replayed == rollout.replayed[:1]).all()


_LEADING = ("observation", "action", "extras")
_FLAT = (
    *("done", "episode_step", "episode_return", "truncated", "episode_end", "policy_version"),
    *("env_index", "rollout_index", "info", "valid", "replayed", "weights"),
)


def assert_is_right(rollout: Any, observe: Callable[[int], Any]) -> None:
    """Every entry of the observations of a rollout of `Assorted` environments is as defined.

    The step of an episode is told by the counters: rewards, ends and steps travel on their own.
    """
    check_rollout(rollout)
    steps = np.where(rollout.done, 0, rollout.episode_step)
    _assert_equal(rollout.observation, observe, steps)
    rows, columns = rollout.truncations()
    _assert_equal(rollout.final_observation, observe, rollout.episode_step[rows, columns].numpy())


def _assert_equal(found: Any, observe: Callable[[int], Any], steps: np.ndarray) -> None:
    """found: leaves [*steps.shape, ...], each of the observation at that step."""
    expected = [flatten(map_leaves(np.asarray, observe(int(step)))) for step in steps.flat]
    first = flatten(map_leaves(np.asarray, observe(0)))
    leaves = flatten(found)
    assert len(leaves) == len(first)
    for index, (tensor, one) in enumerate(zip(leaves, first, strict=True)):
        assert str(tensor.dtype).removeprefix("torch.") == one.dtype.name
        wanted = np.array([each[index] for each in expected], one.dtype)
        np.testing.assert_array_equal(tensor.numpy(), wanted.reshape(*steps.shape, *one.shape))
