# SPDX-License-Identifier: Apache-2.0
"""Spaces: what Gymnasium's become, and that nothing is lost on the way through JSON."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from torchbeast.core.envs.spaces import (
    ActionSpace,
    ArraySpec,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    action_space_from_json,
    action_space_to_json,
    from_gymnasium,
    observation_spec,
    spec_of,
)

# Gymnasium's space, ours, and ours as JSON.
ACTION_SPACES: list[tuple[Any, ActionSpace, dict[str, Any]]] = [
    (gym_spaces.Discrete(6), Discrete(6), {"type": "Discrete", "n": 6, "start": 0}),
    (
        gym_spaces.Discrete(3, start=-1),
        Discrete(3, start=-1),
        {"type": "Discrete", "n": 3, "start": -1},
    ),
    (
        gym_spaces.MultiDiscrete([3, 2]),
        MultiDiscrete((3, 2)),
        {"type": "MultiDiscrete", "nvec": [3, 2]},
    ),
    (gym_spaces.MultiBinary(4), MultiBinary((4,)), {"type": "MultiBinary", "shape": [4]}),
    (
        gym_spaces.Box(-1, 1, (2,), np.float32),
        Box(-1, 1, (2,)),
        {
            "type": "Box",
            "low": [-1.0, -1.0],
            "high": [1.0, 1.0],
            "shape": [2],
            "dtype": "float32",
        },
    ),
    (
        gym_spaces.Box(np.array([[-np.inf], [0]]), np.array([[2.5], [np.inf]]), dtype=np.float64),
        Box((-math.inf, 0), (2.5, math.inf), (2, 1), "float64"),
        {
            "type": "Box",
            "low": ["-inf", 0.0],
            "high": [2.5, "inf"],
            "shape": [2, 1],
            "dtype": "float64",
        },
    ),
    (
        gym_spaces.Tuple([gym_spaces.Discrete(2), gym_spaces.Tuple([])]),
        (Discrete(2), ()),
        {
            "type": "Tuple",
            "spaces": [
                {"type": "Discrete", "n": 2, "start": 0},
                {"type": "Tuple", "spaces": []},
            ],
        },
    ),
    (
        gym_spaces.Dict(b=gym_spaces.Discrete(2), a=gym_spaces.MultiBinary([1, 2])),
        {"a": MultiBinary((1, 2)), "b": Discrete(2)},
        {
            "type": "Dict",
            "spaces": {
                "a": {"type": "MultiBinary", "shape": [1, 2]},
                "b": {"type": "Discrete", "n": 2, "start": 0},
            },
        },
    ),
]


@pytest.mark.parametrize(("theirs", "ours", "data"), ACTION_SPACES)
def test_a_gymnasium_space_becomes_ours(theirs: Any, ours: ActionSpace, data: Any) -> None:
    assert from_gymnasium(theirs) == ours


@pytest.mark.parametrize(("theirs", "ours", "data"), ACTION_SPACES)
def test_json_is_as_documented_and_reads_back(theirs: Any, ours: ActionSpace, data: Any) -> None:
    written = json.loads(json.dumps(action_space_to_json(ours), allow_nan=False))
    assert written == data
    assert action_space_from_json(written) == ours


def test_dicts_are_in_sorted_order() -> None:
    space = from_gymnasium(gym_spaces.Dict(b=gym_spaces.Discrete(2), a=gym_spaces.Discrete(1)))
    assert list(space) == ["a", "b"]
    assert list(action_space_to_json({"b": Discrete(2), "a": Discrete(1)})["spaces"]) == ["a", "b"]


def test_a_subclass_is_read_as_its_base() -> None:
    class Special(gym_spaces.Discrete):
        pass

    assert from_gymnasium(Special(4)) == Discrete(4)


def test_old_gyms_discrete_has_no_start() -> None:
    old = type("Discrete", (SimpleNamespace,), {})(n=3, shape=(), dtype=np.dtype(np.int64))
    assert from_gymnasium(old) == Discrete(3)
    assert observation_spec(old) == ArraySpec((), "int64")


@pytest.mark.parametrize(
    "space",
    [
        gym_spaces.Text(3),
        gym_spaces.MultiDiscrete([[1, 2], [3, 4]]),
        gym_spaces.MultiDiscrete([2, 2], start=[1, 0]),
        "Discrete",
        None,
    ],
)
def test_an_unsupported_space_is_refused(space: Any) -> None:
    with pytest.raises(ValueError, match=r"not supported|needs a flat nvec"):
        from_gymnasium(space)


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        None,
        3,
        {"type": "Sphere"},
        {"type": "Discrete"},
        {"type": "Discrete", "n": 0},
        {"type": "Discrete", "n": "many"},
        {"type": "MultiDiscrete", "nvec": []},
        {"type": "Tuple", "spaces": 3},
        {"type": "Dict", "spaces": []},
        {"type": "Box", "low": [0], "high": [1, 2], "shape": [2], "dtype": "object"},
    ],
)
def test_json_that_is_no_action_space_is_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        action_space_from_json(data)


def test_something_else_is_no_action_space() -> None:
    with pytest.raises(ValueError, match=r"not an action space: \[1\]"):
        action_space_to_json([1])


def test_an_observation_space_is_read_leaf_by_leaf() -> None:
    space = gym_spaces.Dict(
        image=gym_spaces.Box(0, 255, (3, 8, 8), np.uint8),
        pair=gym_spaces.Tuple([gym_spaces.Discrete(4), gym_spaces.MultiBinary(2)]),
    )
    expected = {
        "image": ArraySpec((3, 8, 8), "uint8"),
        "pair": (ArraySpec((), "int64"), ArraySpec((2,), "int8")),
    }
    assert observation_spec(space) == expected
    assert spec_of(space.sample()) == expected


@pytest.mark.parametrize("dtype", ["object", "complex64", "datetime64[s]", "U3", "longdouble"])
def test_a_dtype_that_cannot_be_sent_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        ArraySpec((1,), dtype)


def test_specs_compare_by_value_whatever_spells_them() -> None:
    assert ArraySpec((np.int64(2),), np.dtype("<f4")) == ArraySpec((2,), "float32")
    assert hash(Box(0, 1, (2,))) == hash(Box((0.0, 0.0), (1.0, 1.0), (2,)))


def test_box_bounds_of_another_size_are_refused_with_both_sides() -> None:
    with pytest.raises(ValueError, match=r"low of shape \(2,\) needs 1 or 2 numbers, got 3"):
        Box((1.0, 2.0, 3.0), 4.0, (2,))
