# SPDX-License-Identifier: Apache-2.0
"""Nests in pure Python, with the conventions of the compiled module `nest`.

A nest is a tuple or list (a vector), a dict with string keys (a map), or anything else (a leaf).
Vectors come back as tuples, maps as dicts with sorted keys; leaves keep their identity. The order
is depth first, keys sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Nest: TypeAlias = T | tuple["Nest[T]", ...] | dict[str, "Nest[T]"]


def map_leaves(f: Callable[[Any], Any], nest: Any) -> Any:
    """Returns the nest with f(leaf) in place of every leaf.

    Args:
        f: Called with each leaf.
        nest: Tuples, lists and dicts of leaves.

    Example:
        ```python
        actions = map_leaves(lambda leaf: leaf[1:], rollout.action)
        ```
    """
    if isinstance(nest, (tuple, list)):
        return tuple(map_leaves(f, entry) for entry in nest)
    if isinstance(nest, dict):
        return {key: map_leaves(f, nest[key]) for key in sorted(nest)}
    return f(nest)


def map_leaves2(f: Callable[[Any, Any], Any], a: Any, b: Any, path: str = "") -> Any:
    """Returns a nest like a and b with f(leaf of a, leaf of b) in place of every pair of leaves.

    Args:
        f: Called with each pair.
        a: A nest.
        b: A nest of the same structure.
        path: The place of both in larger nests, for the error.

    Raises:
        ValueError: If the structures differ; it names the place.
    """
    if (kind := _kind(a)) != _kind(b):
        raise ValueError(f"nests don't match{path and f' at {path}'}: {kind} vs {_kind(b)}")
    if isinstance(a, dict):
        return {key: map_leaves2(f, a[key], b[key], f"{path}[{key!r}]") for key in sorted(a)}
    if isinstance(a, (tuple, list)):
        pairs = enumerate(zip(a, b, strict=True))
        return tuple(map_leaves2(f, *pair, f"{path}[{i}]") for i, pair in pairs)
    return f(a, b)


def flatten(nest: Any) -> list[Any]:
    """Returns the leaves of the nest in traversal order."""
    if isinstance(nest, (tuple, list)):
        return [leaf for entry in nest for leaf in flatten(entry)]
    if isinstance(nest, dict):
        return flatten([nest[key] for key in sorted(nest)])
    return [nest]


def pack_as(nest: Any, leaves: Sequence[Any]) -> Any:
    """Returns a nest of the same structure with other leaves.

    Args:
        nest: The structure.
        leaves: The leaves in traversal order.

    Raises:
        ValueError: Unless there are exactly as many leaves as the nest has.
    """
    if len(leaves) != (count := len(flatten(nest))):
        raise ValueError(f"the nest has {count} leaves, the sequence {len(leaves)}")
    remaining = iter(leaves)
    return map_leaves(lambda _: next(remaining), nest)


def _kind(nest: Any) -> str:
    if isinstance(nest, (tuple, list)):
        return f"a vector of length {len(nest)}"
    return f"a map with the keys {sorted(nest)}" if isinstance(nest, dict) else "a leaf"
