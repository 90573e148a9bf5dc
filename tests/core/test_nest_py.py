# SPDX-License-Identifier: Apache-2.0
"""Nests in pure Python follow the conventions of the compiled module."""

from __future__ import annotations

from typing import Any

import pytest

from torchbeast.core.base import nest as nests

NESTS: list[tuple[Any, list[Any]]] = [
    (1, [1]),
    (None, [None]),
    ((), []),
    ({}, []),
    ([1, (2, {"b": 4, "a": 3})], [1, 2, 3, 4]),
    ({"z": (), "a": {"y": [5], "x": 6}}, [6, 5]),
]


@pytest.mark.parametrize(("nest", "leaves"), NESTS)
def test_leaves_come_depth_first_and_in_key_order(nest: Any, leaves: list[Any]) -> None:
    assert nests.flatten(nest) == leaves


@pytest.mark.parametrize(("nest", "leaves"), NESTS)
def test_packing_the_leaves_gives_the_nest_back(nest: Any, leaves: list[Any]) -> None:
    assert nests.pack_as(nest, leaves) == nests.map_leaves(lambda leaf: leaf, nest)


def test_vectors_become_tuples_and_maps_have_sorted_keys() -> None:
    mapped = nests.map_leaves(str, {"b": [1, 2], "a": 3})
    assert mapped == {"a": "3", "b": ("1", "2")}
    assert list(mapped) == ["a", "b"]


def test_leaves_keep_their_identity() -> None:
    leaf = object()
    assert nests.map_leaves(lambda x: x, [leaf])[0] is leaf


def test_two_nests_are_walked_together() -> None:
    a, b = ({"x": 1}, [2]), ({"x": 10}, (20,))
    assert nests.map_leaves2(lambda x, y: x + y, a, b) == ({"x": 11}, (22,))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((1, 2), (1,), r"nests don't match: a vector of length 2 vs a vector of length 1$"),
        ({"a": 1}, {}, r"nests don't match: a map with the keys \['a'\] vs .* the keys \[\]$"),
        ({"a": 1}, {"b": 1}, r"match: a map with the keys \['a'\] vs .* the keys \['b'\]$"),
        ((), {}, r"nests don't match: a vector of length 0 vs a map with the keys \[\]$"),
        (1, (1,), r"nests don't match: a leaf vs a vector of length 1$"),
        (
            {"o": [1, {"a": 2}]},
            {"o": [1, 2]},
            r"nests don't match at \['o'\]\[1\]: a map with the keys \['a'\] vs a leaf",
        ),
    ],
)
def test_a_difference_of_structure_is_named_with_its_place(a: Any, b: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nests.map_leaves2(lambda x, y: x, a, b)


@pytest.mark.parametrize("leaves", [[1], [1, 2, 3]])
def test_packing_needs_as_many_leaves_as_the_nest_has(leaves: list[int]) -> None:
    with pytest.raises(ValueError, match=f"the nest has 2 leaves, the sequence {len(leaves)}"):
        nests.pack_as((0, 0), leaves)


def test_packing_from_a_generator_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        nests.pack_as((0,), (x for x in [1]))
