# SPDX-License-Identifier: Apache-2.0
"""Spaces: conversion from Gymnasium's, and to JSON and back without a loss."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces as gym_spaces

from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.spaces import (
    ActionSpace,
    ArraySpec,
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    from_gymnasium,
    observation_space_of,
    observation_spec,
    space_from_json,
    space_to_json,
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
        {"type": "Box", "low": [-1.0, -1.0], "high": [1.0, 1.0], "shape": [2], "dtype": "float32"},
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
        gym_spaces.MultiDiscrete([[2, 3]], start=[[1, -1]]),
        Box((1, -1), (2, 1), (1, 2), "int64"),
        {"type": "Box", "low": [1.0, -1.0], "high": [2.0, 1.0], "shape": [1, 2], "dtype": "int64"},
    ),
    (
        gym_spaces.Tuple([gym_spaces.Discrete(2), gym_spaces.Tuple([])]),
        (Discrete(2), ()),
        {
            "type": "Tuple",
            "spaces": [{"type": "Discrete", "n": 2, "start": 0}, {"type": "Tuple", "spaces": []}],
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
    written = json.loads(json.dumps(space_to_json(ours), allow_nan=False))
    assert written == data
    assert space_from_json(written) == ours


def test_dicts_are_in_sorted_order() -> None:
    space = from_gymnasium(gym_spaces.Dict(b=gym_spaces.Discrete(2), a=gym_spaces.Discrete(1)))
    assert list(space) == ["a", "b"]
    assert list(space_to_json({"b": Discrete(2), "a": Discrete(1)})["spaces"]) == ["a", "b"]


def test_a_subclass_of_a_gymnasium_space_is_converted_like_its_base() -> None:
    class Special(gym_spaces.Discrete):
        pass

    assert from_gymnasium(Special(4)) == Discrete(4)


def test_old_gyms_discrete_has_no_start() -> None:
    old = type("Discrete", (SimpleNamespace,), {})(n=3, shape=(), dtype=np.dtype(np.int64))
    assert from_gymnasium(old) == Discrete(3)
    assert observation_spec(old) == ArraySpec((), "int64", 0, 2, categories=(3,))


@pytest.mark.parametrize(
    "space",
    [
        gym_spaces.Text(3),
        gym_spaces.Box(-np.inf, np.inf, (2,), np.int32),
        gym_spaces.Box(np.array([0, 0]), np.array([1, 2**16]), dtype=np.int64),
        "Discrete",
        None,
    ],
)
def test_an_unsupported_space_is_refused(space: Any) -> None:
    with pytest.raises(ValueError, match="not supported|declare the actual bounds"):
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
def test_json_that_is_no_space_is_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        space_from_json(data)


def test_an_observation_space_is_read_leaf_by_leaf() -> None:
    space = gym_spaces.Dict(
        image=gym_spaces.Box(0, 255, (3, 8, 8), np.uint8),
        pair=gym_spaces.Tuple([gym_spaces.Discrete(4), gym_spaces.MultiBinary(2)]),
    )
    expected = {
        "image": ArraySpec((3, 8, 8), "uint8", 0, 255),
        "pair": (ArraySpec((), "int64", 0, 3, categories=(4,)), ArraySpec((2,), "int8", 0, 1)),
    }
    assert observation_spec(space) == expected
    assert observation_space_of(space.sample(), space, "observation") == expected
    assert spec_of(space.sample()) == map_leaves(lambda s: ArraySpec(s.shape, s.dtype), expected)


# Gymnasium's space and the values that it says observations have.
VALUES = [
    (gym_spaces.Discrete(5, start=-2), {"low": -2, "high": 2, "categories": (5,), "start": (-2,)}),
    (gym_spaces.MultiDiscrete([3, 2]), {"low": 0, "high": 2, "categories": (3, 2)}),
    (
        gym_spaces.MultiDiscrete(np.full((2, 3), 7), start=np.full((2, 3), 1)),
        {"low": 1, "high": 7, "categories": (7,), "start": (1,)},
    ),
    (gym_spaces.MultiBinary([2, 2]), {"low": 0, "high": 1}),
    (gym_spaces.Box(-np.inf, np.inf, (3,)), {"low": -math.inf, "high": math.inf}),
    (
        gym_spaces.Box(np.array([-4.0, -np.inf]), np.array([4.0, 2.0]), dtype=np.float64),
        {"low": -math.inf, "high": 4},
    ),
    (gym_spaces.Box(0, 5976, (21, 79), np.int16), {"low": 0, "high": 5976}),
    (gym_spaces.Box(0, 1, (0, 2)), {}),
]


@pytest.mark.parametrize(("space", "values"), VALUES, ids=lambda value: str(value)[:40])
def test_a_leaf_keeps_its_bounds_and_categories(space: Any, values: dict[str, Any]) -> None:
    expected = ArraySpec(space.shape, space.dtype, **values)
    assert observation_spec(space) == expected


def test_observation_spaces_read_back_from_the_json_that_is_documented() -> None:
    space = ArraySpec((2,), "float32", -math.inf, 1)
    data = {"shape": [2], "dtype": "float32", "low": "-inf", "high": 1.0}
    data |= {"categories": None, "start": [0]}
    assert space_to_json(space) == {"type": "ArraySpec", **data}
    assert space_from_json({"type": "ArraySpec", **data}) == space


def test_a_large_picture_reads_back_from_json() -> None:
    space = ArraySpec((1920, 1080, 3), "uint8", 0, 255)
    assert space_from_json(space_to_json(space)) == space


@pytest.mark.parametrize(("space", "_"), VALUES, ids=lambda value: str(value)[:40])
def test_an_observation_space_reads_back_from_json_with_dtypes_and_shapes(
    space: Any, _: dict[str, Any]
) -> None:
    ours = {"a": observation_spec(space), "b": (ArraySpec((), "uint8"),)}
    assert space_from_json(json.loads(json.dumps(space_to_json(ours), allow_nan=False))) == ours


class Unknown(gym_spaces.Space):  # type: ignore[type-arg]
    """A space of a class that Gymnasium does not have."""


def test_the_observation_decides_only_where_its_space_declares_nothing_usable() -> None:
    image, box = np.zeros((8, 8), np.uint8), gym_spaces.Box(0, 255, (8, 8), np.float32)
    declared, seen = ArraySpec((8, 8), "float32", 0, 255), ArraySpec((8, 8), "uint8")
    for space, observation, expected in [
        (box, image, declared),
        (None, image, seen),
        (Unknown((3,), np.float32), image, seen),
        (gym_spaces.Tuple([box, Unknown((3,), np.float32)]), (image, image), (declared, seen)),
        (gym_spaces.Dict(a=box, b=gym_spaces.Tuple([box])), {"a": image, "b": [image]}, None),
        ({"a": box, "b": None}, {"a": image, "b": (image,)}, {"a": declared, "b": (seen,)}),
    ]:
        expected = expected or {"a": declared, "b": (declared,)}
        assert observation_space_of(observation, space, "observation") == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "Sphere"},
        {"low": "nan"},
        {"low": "much"},
        {"low": [0]},
        {"high": 10**400},
        {"low": 1, "high": 0},
        {"categories": []},
        {"categories": 3},
        {"categories": [0]},
        {"categories": [3, 3, 3]},
        {"categories": [2**62]},
        {"categories": ["many"]},
        {"categories": [3], "start": []},
        {"categories": [3], "start": [-(2**63)]},
        {"categories": [3], "dtype": "float32"},
    ],
)
def test_json_that_is_not_of_an_observation_is_a_value_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        space_from_json({"type": "ArraySpec", "shape": [2], "dtype": "int64", **changes})


@pytest.mark.parametrize("dtype", ["object", "complex64", "datetime64[s]", "U3", "longdouble"])
def test_a_dtype_that_cannot_be_sent_is_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        ArraySpec((1,), dtype)


def test_specs_compare_by_value_for_any_spelling_of_dtype_and_shape() -> None:
    assert ArraySpec((np.int64(2),), np.dtype("<f4")) == ArraySpec((2,), "float32")
    assert hash(Box(0, 1, (2,))) == hash(Box((0.0, 0.0), (1.0, 1.0), (2,)))


def test_box_bounds_of_another_size_are_refused_with_both_sides() -> None:
    with pytest.raises(ValueError, match=r"could not be broadcast .* \(3,\)"):
        Box((1.0, 2.0, 3.0), 4.0, (2,))


@pytest.mark.parametrize(
    "space", [gym_spaces.Text(3), gym_spaces.Sequence(gym_spaces.Discrete(2))], ids=str
)
def test_an_observation_space_without_a_shape_is_refused_by_name(space: Any) -> None:
    with pytest.raises(ValueError, match="a space of type .* is not supported; wrap the env"):
        observation_spec(gym_spaces.Dict(word=space))
