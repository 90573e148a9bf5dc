# SPDX-License-Identifier: Apache-2.0
"""Nests in pure Python, with the conventions of the compiled module `nest`.

A nest is a tuple or list (a vector), a dict with string keys (a map), or anything else (a leaf).
Vectors come back as tuples, maps as dicts with sorted keys; leaves keep their identity. The order
is depth first, keys sorted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    count = len(flatten(nest))
    if len(leaves) != count:
        few, many = "Too few elements in sequence", "Nest didn't exhaust sequence"
        text = few if len(leaves) < count else many
        raise ValueError(f"{text}: the nest has {count} leaves, the sequence {len(leaves)}")
    remaining = iter(leaves)
    return map_leaves(lambda _: next(remaining), nest)


def sorted_keys(nest: dict[str, Any]) -> list[str]:
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
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        _check_same_length("vectors", a, b, path)
        return tuple(
            _map2(f, *pair, f"{path}[{i}]") for i, pair in enumerate(zip(a, b, strict=True))
        )
    if isinstance(a, dict) and isinstance(b, dict):
        _check_same_keys(a, b, path)
        return {key: _map2(f, a[key], b[key], f"{path}[{key!r}]") for key in sorted_keys(a)}
    if _kind(a) == _kind(b) == "a leaf":
        return f(a, b)
    raise ValueError(f"nests don't match{_at(path)}: {_kind(a)} vs {_kind(b)}")


def _check_same_keys(a: dict[str, Any], b: dict[str, Any], path: str) -> None:
    _check_same_length("maps", a, b, path)
    for key_a, key_b in zip(sorted_keys(a), sorted_keys(b), strict=True):
        if key_a != key_b:
            text = f"Expected maps to have same keys but found {key_a!r} vs {key_b!r}"
            raise ValueError(text + _at(path))


def _check_same_length(kind: str, a: Any, b: Any, path: str) -> None:
    if len(a) != len(b):
        text = f"Expected {kind} of same length but got {len(a)} vs {len(b)}"
        raise ValueError(text + _at(path))


def _kind(nest: Any) -> str:
    if isinstance(nest, (tuple, list)):
        return "a vector"
    return "a map" if isinstance(nest, dict) else "a leaf"


def _at(path: str) -> str:
    return f" at {path}" if path else ""
