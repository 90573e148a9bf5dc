# SPDX-License-Identifier: Apache-2.0
"""Descriptions of observations and actions that need neither Gymnasium nor torch.

An observation space is a nest of `ArraySpec`. An action space is a nest of `Discrete`,
`MultiDiscrete`, `MultiBinary` and `Box`. A nest is a leaf, a tuple of nests, or a dict of nests
with string keys. Both describe ONE environment, without time or batch dimensions, and both
compare by value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from torchbeast.core.base.checks import at_least, require, short_repr
from torchbeast.core.base.nest import flatten, map_leaves, pack_as

# Dtypes of the wire format, by numpy's names.
_INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
WIRE_DTYPES = frozenset(("bool", *_INTEGERS, "float16", "float32", "float64"))


_LARGEST_CATEGORY = 2**62 - 1
_MOST_CHOICES = 2**16  # of an entry of an integer Box: all of an int16; a dtype's range is no bound


@dataclass(frozen=True)
class ArraySpec:
    """One array of an observation: its shape, its dtype, and known facts about its values.

    Args:
        shape: The shape of the array.
        dtype: The numpy name of its dtype.
        low: Lower bound of every entry; -inf: unbounded, None: unknown.
        high: Upper bound of every entry; inf: unbounded, None: unknown.
        categories: Number of categories, one for all entries or one per entry in C order; stored as
            one number if all are equal. None: entries are quantities.
        start: The smallest category, likewise.
    """

    shape: tuple[int, ...]
    dtype: str
    low: float | None = None
    high: float | None = None
    categories: tuple[int, ...] | None = None
    start: tuple[int, ...] = (0,)
    __repr__ = short_repr

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        object.__setattr__(self, "dtype", _wire_dtype(self.dtype))
        object.__setattr__(self, "low", _bound("low", self.low))
        object.__setattr__(self, "high", _bound("high", self.high))
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")
        object.__setattr__(self, "start", self._per_entry("start", self.start))
        if self.categories is not None:
            object.__setattr__(self, "categories", self._per_entry("categories", self.categories))
            self._check_categories(self.categories)

    def _per_entry(self, name: str, given: Sequence[int]) -> tuple[int, ...]:
        numbers, size = tuple(int(number) for number in given), math.prod(self.shape)
        if len(numbers) not in (1, size):
            raise ValueError(
                f"{name} of shape {self.shape} needs 1 or {size} numbers, got {len(numbers)}"
            )
        return numbers[:1] if len(set(numbers)) == 1 else numbers

    def _check_categories(self, categories: tuple[int, ...]) -> None:
        at_least(1, categories=min(categories))
        if self.dtype.startswith("float"):
            raise ValueError(f"categories are integers, got the dtype {self.dtype}")
        if max(*categories, *map(abs, self.start), 0) > _LARGEST_CATEGORY:
            raise ValueError("categories must be numbers of 62 bits")


@dataclass(frozen=True)
class Discrete:
    """Space of the integers start, ..., start + n - 1, as an int64 of shape ().

    Args:
        n: Number of actions.
        start: The smallest action.
    """

    n: int
    start: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", int(self.n))
        object.__setattr__(self, "start", int(self.start))
        require(self.n >= 1, f"Discrete needs at least one action, got n={self.n}")


@dataclass(frozen=True)
class MultiDiscrete:
    """Space of several choices, as int64 [len(nvec)].

    Args:
        nvec: Numbers of alternatives; the i-th choice is one of 0, ..., nvec[i] - 1.
    """

    nvec: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "nvec", tuple(int(n) for n in self.nvec))
        if not self.nvec or min(self.nvec) < 1:
            raise ValueError(f"MultiDiscrete needs positive counts, got nvec={self.nvec}")


@dataclass(frozen=True)
class MultiBinary:
    """Space of arrays of zeros and ones.

    Args:
        shape: The shape of the arrays.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))


@dataclass(frozen=True)
class Box:
    """Space of arrays of numbers between low and high. With an integer dtype each entry is a choice
    among low, ..., high, as in a MultiDiscrete.

    Args:
        low: Lower bound, one for all entries or one per entry; -inf: unbounded. Stored as a flat
            tuple with one float per entry, in C order.
        high: Upper bound, likewise; inf: unbounded.
        shape: The shape of the arrays.
        dtype: The numpy name of their dtype.
    """

    low: float | tuple[float, ...]
    high: float | tuple[float, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        for name in ("low", "high"):
            bound = np.asarray(getattr(self, name), np.float64).ravel()
            flat = np.broadcast_to(bound, math.prod(self.shape))
            object.__setattr__(self, name, tuple(flat.tolist()))
        object.__setattr__(self, "dtype", _wire_dtype(self.dtype))
        if self.is_integer:
            self._check_choices()

    @property
    def is_integer(self) -> bool:
        """Whether the entries are choices."""
        return not self.dtype.startswith("float")

    @property
    def nvec(self) -> tuple[int, ...]:
        """The number of choices of each entry, in C order; only of integers."""
        low, high = self.bounds
        return tuple(int(number) for number in (high - low + 1).flat)

    @property
    def start(self) -> tuple[int, ...]:
        """The smallest choice of each entry, likewise."""
        return tuple(int(number) for number in self.bounds[0].flat)

    @cached_property
    def bounds(self) -> np.ndarray:
        """The lower and the upper bounds, float64 [2, *shape]."""
        return np.reshape([self.low, self.high], (2, *self.shape))

    def _check_choices(self) -> None:
        low, high = self.bounds.reshape(2, -1)
        wrong = ~((low <= high) & (high - low < _MOST_CHOICES))
        if wrong.any():
            entry = int(wrong.argmax())
            raise ValueError(
                f"each entry of a Box of {self.dtype} must have 1 to {_MOST_CHOICES:,} values, got "
                f"{low[entry]:,.0f}, ..., {high[entry]:,.0f} in entry {entry}: declare the actual "
                "bounds, or a Box of float32"
            )


ObservationSpace = ArraySpec | tuple["ObservationSpace", ...] | dict[str, "ObservationSpace"]
ActionLeaf = Discrete | MultiDiscrete | MultiBinary | Box
ActionSpace = ActionLeaf | tuple["ActionSpace", ...] | dict[str, "ActionSpace"]
ArrayNest = np.ndarray | tuple["ArrayNest", ...] | dict[str, "ArrayNest"]


def _wire_dtype(dtype: Any) -> str:
    name = str(np.dtype(dtype).name)
    if name not in WIRE_DTYPES:
        known = ", ".join(sorted(WIRE_DTYPES))
        raise ValueError(f"dtype {name} cannot be sent; use one of {known}")
    return name


def _bound(name: str, bound: Any) -> float | None:
    if bound is None:
        return None
    value = float(bound)
    require(not math.isnan(value), f"{name} must be a number, got NaN")
    return value


def num_bytes(specs: Any) -> int:
    """Returns the bytes of one array for each ArraySpec of a nest."""
    return sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in flatten(specs))


# --- JSON, in which a server describes its spaces to the learner.


def space_to_json(space: ActionSpace | ObservationSpace) -> dict[str, Any]:
    """Returns a space as JSON values, such as {"type": "Discrete", "n": 6, "start": 0}.

    Raises ValueError when it is neither an action space nor an observation space.
    """
    if isinstance(space, tuple):
        return {"type": "Tuple", "spaces": [space_to_json(entry) for entry in space]}
    if isinstance(space, dict):
        parts = {key: space_to_json(space[key]) for key in sorted(space)}
        return {"type": "Dict", "spaces": parts}
    values = {name: _to_json(value) for name, value in asdict(space).items()}
    return {"type": type(space).__name__, **values}


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_to_json(entry) for entry in value]
    # JSON has no infinity: write it as a string that float() parses.
    return str(value) if value in (math.inf, -math.inf) else value


def space_from_json(data: dict[str, Any]) -> Any:
    """Parses the result of `space_to_json`; raises ValueError for anything else, and for spaces of
    more entries than an action can have: the bounds of each entry are stored.
    """
    try:
        if sum(flatten(_described(data, _num_bounds))) > _MOST_ENTRIES:
            raise ValueError(f"a space may have {_MOST_ENTRIES} entries, got more")
        return _described(data, _leaf_from_json)
    except (KeyError, TypeError, AttributeError, OverflowError, SyntaxError) as error:
        raise ValueError(f"not the description of a space: {data!r}") from error


_MOST_ENTRIES = 1 << 22


_LEAVES = {kind.__name__: kind for kind in (Discrete, MultiDiscrete, MultiBinary, Box, ArraySpec)}


def _described(data: Any, leaf: Callable[[Any], Any]) -> Any:
    """Returns leaf(description) for every leaf of a described space, as a nest."""
    match data:
        case {"type": "Tuple", "spaces": parts}:
            return tuple(_described(part, leaf) for part in parts)
        case {"type": "Dict", "spaces": parts}:
            return {key: _described(part, leaf) for key, part in sorted(parts.items())}
    return leaf(data)


def _num_bounds(data: Any) -> int:
    """Returns how many entries of a described leaf have bounds of their own."""
    if data["type"] == "ArraySpec" or "shape" not in data:
        return 1  # an ArraySpec has one bound for all entries
    return math.prod(abs(int(size)) for size in data["shape"])


def _leaf_from_json(data: dict[str, Any]) -> Any:
    values = {name: value for name, value in data.items() if name != "type"}
    return _LEAVES[data["type"]](**values)


# --- Gymnasium's (and old Gym's) spaces, told apart by class name so that neither is imported.


_KNOWN_KINDS = ("Discrete", "MultiDiscrete", "MultiBinary", "Box", "Tuple", "Dict")


def _kind(space: Any) -> str:
    """Returns the name of the space's first known class; ValueError if there is none."""
    names = _class_names(space)
    for name in names:
        if name in _KNOWN_KINDS:
            return name
    raise ValueError(
        f"a space of type {names[0]} is not supported; "
        f"wrap the environment so that it uses {', '.join(_KNOWN_KINDS)}"
    )


def _class_names(space: Any) -> list[str]:
    return [cls.__name__ for cls in type(space).__mro__]


def from_gymnasium(space: Any) -> ActionSpace:
    """Converts a gymnasium.spaces (or gym.spaces) object to an action space.

    Raises ValueError for a kind of space that is not supported.
    """
    match _kind(space):
        case "Discrete":
            return Discrete(int(space.n), int(getattr(space, "start", 0)))
        case "MultiDiscrete":
            return _multi_discrete(space)
        case "MultiBinary":
            return MultiBinary(tuple(space.shape))
        case "Box":
            return Box(space.low, space.high, tuple(space.shape), np.dtype(space.dtype).name)
        case "Tuple":
            return tuple(from_gymnasium(entry) for entry in space.spaces)
        case _:
            return {key: from_gymnasium(space.spaces[key]) for key in sorted(space.spaces)}


def _multi_discrete(space: Any) -> MultiDiscrete | Box:
    nvec, start = np.asarray(space.nvec), np.asarray(getattr(space, "start", 0))
    if nvec.ndim == 1 and not start.any():
        return MultiDiscrete(tuple(nvec.tolist()))
    low, high = (start + 0 * nvec).ravel(), (start + nvec - 1).ravel()
    return Box(tuple(low.tolist()), tuple(high.tolist()), nvec.shape, space.dtype)


def without_values(space: ObservationSpace) -> ObservationSpace:
    """Returns the observation space with dtypes and shapes only, without bounds and categories."""
    return map_leaves(lambda spec: ArraySpec(spec.shape, spec.dtype), space)


def observation_spec(space: Any) -> ObservationSpace:
    """Converts a gymnasium.spaces (or gym.spaces) object to an observation space.

    Raises ValueError for a kind of space that is not supported.
    """
    return map_leaves(_leaf_spec, declared(space))


def declared(space: Any) -> Any:
    """Returns the leaf spaces of a gymnasium.spaces (or gym.spaces) object as a nest.

    Nests of spaces are accepted too. Whatever is neither Dict nor Tuple is a leaf.
    """
    names = _class_names(space)
    parts = space.spaces if "Dict" in names or "Tuple" in names else space
    if isinstance(parts, Mapping):
        return {key: declared(parts[key]) for key in _string_keys(parts, "the observation space")}
    return tuple(map(declared, parts)) if isinstance(parts, (tuple, list)) else parts


def _leaf_spec(space: Any) -> ArraySpec:
    values = _values(space)  # refuses kinds that may lack a shape
    return ArraySpec(tuple(space.shape), np.dtype(space.dtype).name, **values)


def _values(space: Any) -> dict[str, Any]:
    """Returns bounds and categories of a Gymnasium leaf space as fields of ArraySpec."""
    kind = _kind(space)
    if kind == "MultiBinary":
        return {"low": 0, "high": 1}
    low: Any
    if kind == "Box":
        low, high = np.asarray(space.low), np.asarray(space.high)
        return {"low": low.min(), "high": high.max()} if low.size else {}
    count = np.asarray(space.n if kind == "Discrete" else space.nvec)
    low = np.broadcast_to(getattr(space, "start", 0), count.shape)
    return {
        "low": low.min(),
        "high": (low + count).max() - 1,
        "categories": count.ravel().tolist(),
        "start": low.ravel().tolist(),
    }


def observation_space_of(observation: Any, space: Any, path: str) -> ObservationSpace:
    """Returns the space of an environment's observations, as the environment declares it.

    space: its Gymnasium space, or a nest of these. A leaf that is None, or a space of an unknown
    class, declares nothing usable: there the observation decides.
    path: name of the observation in error messages. Raises ValueError when the observation has
    another structure, or when a leaf cannot be sent.
    """
    spaces = declared(space)
    leaves = [_leaf_space(*place) for place in places(spaces, observation, path)]
    return pack_as(spaces, leaves)


def _leaf_space(space: Any, leaf: Any, path: str) -> ObservationSpace:
    try:
        return _leaf_spec(space)
    except (ValueError, TypeError, AttributeError):  # nothing usable
        return spec_of(leaf, path)


def spec_of(observation: Any, path: str = "observation") -> ObservationSpace:
    """Returns the space of an observation, a nest of arrays or Python numbers.

    path: name of the observation in error messages. Raises ValueError when a leaf has a dtype that
    the wire format cannot carry, or a dict a key that is not a string.
    """
    if isinstance(observation, dict):
        keys = _string_keys(observation, path)
        return {key: spec_of(observation[key], f"{path}[{key!r}]") for key in keys}
    if isinstance(observation, (tuple, list)):
        return tuple(spec_of(entry, f"{path}[{i}]") for i, entry in enumerate(observation))
    array = np.asarray(observation)
    if array.dtype.name not in WIRE_DTYPES:
        raise ValueError(
            f"{path} has dtype {array.dtype}, which cannot be sent: use numbers, or leave the "
            "entry out with observation_keys"
        )
    return ArraySpec(array.shape, array.dtype.name)


def _string_keys(mapping: Mapping[Any, Any], path: str) -> list[str]:
    """Returns the keys in sorted order; raises ValueError when one is not a string."""
    for key in mapping:
        if not isinstance(key, str):
            kind = type(key).__name__
            raise ValueError(f"{path} has the key {key!r} of type {kind}, expected a string")
    return sorted(mapping)


def matching_leaves(space: ObservationSpace, observation: Any, path: str) -> Iterator[np.ndarray]:
    """Yields the leaves of an observation in order, converted to the space's dtypes.

    Conversions keep values, but for the rounding of floats; a float that is too large becomes
    infinite, see `FiniteCheck`.
    path: name of the observation in error messages. Raises ValueError when structure, shape or kind
    of number does not match the space, or an integer does not fit.
    """
    for spec, leaf, where in places(space, observation, path):
        yield _converted(spec, leaf, where)


def places(space: Any, observation: Any, path: str) -> Iterator[tuple[Any, Any, str]]:
    """Yields leaves of a nest of spaces, what the observation has there, and the place's name.

    Raises ValueError when the observation's structure differs.
    """
    if isinstance(space, dict):
        if not isinstance(observation, dict) or observation.keys() != space.keys():
            raise _mismatch(path, f"a dict with the keys {sorted(space)}", _describe(observation))
        for key, entry in space.items():
            yield from places(entry, observation[key], f"{path}[{key!r}]")
    elif isinstance(space, tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(space):
            raise _mismatch(path, f"a tuple of length {len(space)}", _describe(observation))
        for index, entry in enumerate(space):
            yield from places(entry, observation[index], f"{path}[{index}]")
    else:
        yield space, observation, path


def _converted(spec: ArraySpec, leaf: Any, path: str) -> np.ndarray:
    try:
        array = np.asarray(leaf)
    except ValueError:
        got = f"a {type(leaf).__name__} of entries of different shapes"
        raise _mismatch(path, f"{spec.dtype} of shape {spec.shape}", got) from None
    dtype = np.dtype(spec.dtype)
    if array.shape != spec.shape or array.dtype.kind not in _KINDS_FOR[dtype.kind]:
        raise _mismatch(path, f"{spec.dtype} of shape {spec.shape}", _describe(leaf))
    if array.dtype == dtype:
        return array
    if dtype.kind != "f" and not np.can_cast(array.dtype, dtype):
        _check_range(array, dtype, path)
    with np.errstate(all="ignore"):
        return array.astype(dtype)


# The kinds of numpy's dtypes that may become a bool, an integer or a float.
_KINDS_FOR = {"b": "biu", "i": "biu", "u": "biu", "f": "biuf"}


def _check_range(array: np.ndarray, dtype: np.dtype[Any], path: str) -> None:
    """Raises ValueError when an integer would wrap in the dtype."""
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    for value in (int(array.min(initial=0)), int(array.max(initial=0))):
        if not low <= value <= high:
            raise _mismatch(path, f"{dtype} between {low} and {high}", f"{value} of {array.dtype}")


def _mismatch(path: str, expected: str, got: str) -> ValueError:
    return ValueError(
        f"{path}: expected {expected}, as in the environment's observation_space (or its first "
        f"observation, without one), got {got}: make them match"
    )


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of length {len(value)}"
    array = np.asarray(value)
    return f"{array.dtype} of shape {array.shape}"


def random_action(space: ActionSpace, num_envs: int, rng: np.random.Generator) -> Any:
    """Returns one random action per environment, leaves [num_envs, ...].

    Real numbers are drawn from a standard normal distribution; the environment clips them to its
    bounds. Raises ValueError when a leaf of `space` is not an action space.
    """
    return map_leaves(lambda leaf: _random_leaf(leaf, num_envs, rng), space)


def _random_leaf(leaf: Any, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    match leaf:
        case Discrete(n, start):
            return rng.integers(start, start + n, num_envs)
        case MultiDiscrete(nvec):
            return rng.integers(0, nvec, (num_envs, len(nvec)))
        case MultiBinary(shape):
            return rng.integers(0, 2, (num_envs, *shape))
        case Box() if leaf.is_integer:
            choices = rng.integers(0, leaf.nvec, (num_envs, len(leaf.nvec)))
            return (choices + np.array(leaf.start)).reshape(num_envs, *leaf.shape)
        case Box(_, _, shape, dtype):
            return rng.normal(size=(num_envs, *shape)).astype(dtype)
    raise ValueError(f"not an action space: {leaf!r}")
