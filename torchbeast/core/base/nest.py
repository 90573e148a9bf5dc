# SPDX-License-Identifier: Apache-2.0
"""Nests in pure Python, with the conventions of the compiled module `nest`.

A nest is a tuple or list (a vector), a dict with string keys (a map), or anything else (a leaf).
Vectors come back as tuples, maps as dicts with sorted keys; leaves keep their identity. The order
is depth first, keys sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Nest: TypeAlias = T | tuple["Nest[T]", ...] | dict[str, "Nest[T]"]


def map_leaves(f: Callable[[Any], Any], nest: Any) -> Any:
    """Returns the nest with f(leaf) in place of every leaf.

    Args:
        f: Called with each leaf.
        nest: Tuples, lists and dicts of leaves.

    Raises:
        TypeError: If a dict has a key that is not a string.

    Example:
        ```python
        actions = map_leaves(lambda leaf: leaf[1:], rollout.action)
        ```
    """
    if isinstance(nest, (tuple, list)):
        return tuple(map_leaves(f, entry) for entry in nest)
    if isinstance(nest, dict):
        return {key: map_leaves(f, nest[key]) for key in sorted_keys(nest)}
    return f(nest)


def map_leaves2(f: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
    """Returns a nest like a and b with f(leaf of a, leaf of b) in place of every pair of leaves.

    Args:
        f: Called with each pair.
        a: A nest.
        b: A nest of the same structure.

    Raises:
        ValueError: If the structures differ; it names the place.
    """
    return _map2(f, a, b, "")


def flatten(nest: Any) -> list[Any]:
    """Returns the leaves of the nest in traversal order."""
    return list(_leaves(nest))


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


def sorted_keys(nest: Mapping[str, Any]) -> list[str]:
    """Returns the keys of a map in traversal order.

    Raises TypeError when a key is not a string.
    """
    for key in nest:
        if not isinstance(key, str):
            kind = type(key).__name__
            raise TypeError(f"keys of a nest must be strings, got {key!r} of type {kind}")
    return sorted(nest)


def _leaves(nest: Any) -> Iterator[Any]:
    if isinstance(nest, (tuple, list)):
        for entry in nest:
            yield from _leaves(entry)
    elif isinstance(nest, dict):
        for key in sorted_keys(nest):
            yield from _leaves(nest[key])
    else:
        yield nest


def _map2(f: Callable[[Any, Any], Any], a: Any, b: Any, path: str) -> Any:
    if (kind := _kind(a)) != _kind(b):
        raise ValueError(f"nests don't match{path and f' at {path}'}: {kind} vs {_kind(b)}")
    if isinstance(a, dict):
        return {key: _map2(f, a[key], b[key], f"{path}[{key!r}]") for key in sorted_keys(a)}
    if isinstance(a, (tuple, list)):
        pairs = enumerate(zip(a, b, strict=True))
        return tuple(_map2(f, *pair, f"{path}[{i}]") for i, pair in pairs)
    return f(a, b)


def _kind(nest: Any) -> str:
    if isinstance(nest, (tuple, list)):
        return f"a vector of length {len(nest)}"
    return f"a map with the keys {sorted_keys(nest)}" if isinstance(nest, dict) else "a leaf"
