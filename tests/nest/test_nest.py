# SPDX-License-Identifier: Apache-2.0
"""The promises of the module `nest`, on one table of awkward nests and against a slow reference."""

from __future__ import annotations

import collections
import doctest
import functools
import gc
import math
import pathlib
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pytest
from later import later

import nest


class Point(NamedTuple):
    """A subclass of tuple."""

    x: Any
    y: Any


class MyList(list):
    """A subclass of list that lies about its content; the nest is what it really holds."""

    def __iter__(self) -> Iterator[Any]:
        return iter(("a", "lie"))


class MyStr(str):
    """A subclass of str, as a key."""


class Callable_:
    """An object that can be called."""

    def __call__(self, leaf: Any) -> Any:
        return leaf


A, B, C, D = (f"leaf {name} of the table" for name in "ABCD")
SET, ARRAY, RANGE = {1, 2}, np.zeros(3), range(3)


class Row(NamedTuple):
    """A nest, its leaves in order, and the same nest made of plain tuples and dicts."""

    nest: Any
    leaves: list
    plain: Any


TABLE = {
    "leaf": Row(A, [A], A),
    "None": Row(None, [None], None),
    "string, not a sequence of characters": Row("abc", ["abc"], "abc"),
    "bytes": Row(b"abc", [b"abc"], b"abc"),
    "set": Row(SET, [SET], SET),
    "array": Row(ARRAY, [ARRAY], ARRAY),
    "range": Row(RANGE, [RANGE], RANGE),
    "empty tuple": Row((), [], ()),
    "empty list": Row([], [], ()),
    "empty map": Row({}, [], {}),
    "empties inside": Row([(), {}, [[]]], [], ((), {}, ((),))),
    "front behind empties": Row([(), {"a": {}}, A], [A], ((), {"a": {}}, A)),
    "None inside": Row({"a": None, "b": (None,)}, [None, None], {"a": None, "b": (None,)}),
    "one leaf thrice": Row([A, (A, {"k": A})], [A, A, A], (A, (A, {"k": A}))),
    "unsorted keys": Row({"b": B, "c": C, "a": A}, [A, B, C], {"a": A, "b": B, "c": C}),
    "keys in code point order": Row(
        {"\U0001f600": D, "\uffff": C, "a": B, "Z": A},
        [A, B, C, D],
        {"Z": A, "a": B, "\uffff": C, "\U0001f600": D},
    ),
    "empty key and key with NUL": Row(
        {"": A, "a\0b": C, "a": B}, [A, B, C], {"": A, "a": B, "a\0b": C}
    ),
    "subclass of str as key": Row({MyStr("k"): A}, [A], {"k": A}),
    "namedtuple": Row(Point(A, [B]), [A, B], (A, (B,))),
    "OrderedDict": Row(collections.OrderedDict([("b", B), ("a", A)]), [A, B], {"a": A, "b": B}),
    "defaultdict": Row(collections.defaultdict(list, k=[A]), [A], {"k": (A,)}),
    "lying subclass of list": Row(MyList([A, B]), [A, B], (A, B)),
    "all kinds": Row(
        {"b": [B, (C, {"x": D})], "a": A}, [A, B, C, D], {"a": A, "b": (B, (C, {"x": D}))}
    ),
}


@pytest.fixture(params=TABLE.values(), ids=TABLE.keys())
def row(request: pytest.FixtureRequest) -> Row:
    return request.param


def reference_flatten(n: Any) -> list:
    """Computes `flatten` by its definition, slowly."""
    if isinstance(n, (tuple, list)):
        return [leaf for child in n for leaf in reference_flatten(child)]
    if isinstance(n, dict):
        return [leaf for key in sorted(n) for leaf in reference_flatten(n[key])]
    return [n]


def reference_map(f: Callable[[Any], Any], n: Any) -> Any:
    """Computes `map` by its definition, slowly."""
    if isinstance(n, (tuple, list)):
        return tuple(reference_map(f, child) for child in n)
    if isinstance(n, dict):
        return {key: reference_map(f, n[key]) for key in sorted(n)}
    return f(n)


def random_nest(rng: random.Random, depth: int = 5) -> Any:
    kind = rng.choice(["leaf", "tuple", "list", "dict"]) if depth else "leaf"
    if kind == "leaf":
        return rng.randrange(1000)
    children = [random_nest(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == "dict":
        return dict(zip(rng.sample("abcdefgh", len(children)), children, strict=True))
    return tuple(children) if kind == "tuple" else children


def identity(leaf: Any) -> Any:
    return leaf


def same_objects(a: list, b: list) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def assert_plain(result: Any, plain: Any) -> None:
    """Asserts that types, order of keys and the leaf objects themselves are the same."""
    assert type(result) is type(plain)
    if type(plain) is tuple:
        assert len(result) == len(plain)
        for child, wanted in zip(result, plain, strict=True):
            assert_plain(child, wanted)
    elif type(plain) is dict:
        assert list(result) == list(plain)
        assert all(type(key) is str for key in result)
        for key in plain:
            assert_plain(result[key], plain[key])
    else:
        assert result is plain


# The calls of the module on one nest, for what must be true of each of them.
CALLS: dict[str, Callable[[Any], Any]] = {
    "flatten": nest.flatten,
    "front": nest.front,
    "map": lambda n: nest.map(identity, n),
    "map_many": lambda n: nest.map_many(lambda leaves: leaves[0], n, n),
    "map_many2": lambda n: nest.map_many2(lambda a, b: a, n, n),
    "pack_as": lambda n: nest.pack_as(n, reference_flatten(n)),
}


@pytest.fixture(params=CALLS.values(), ids=CALLS.keys())
def call(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return request.param


# What each function does.


def test_flatten_lists_the_leaves_in_traversal_order(row: Row) -> None:
    result = nest.flatten(row.nest)
    assert type(result) is list
    assert same_objects(result, row.leaves)


def test_map_gives_plain_tuples_and_dicts_around_the_same_leaves(row: Row) -> None:
    assert_plain(nest.map(identity, row.nest), row.plain)


def test_map_calls_f_in_traversal_order_once_for_each_leaf(row: Row) -> None:
    seen: list = []
    nest.map(seen.append, row.nest)
    assert same_objects(seen, row.leaves)


def test_map_many_of_one_nest_is_map_with_a_list_of_one(row: Row) -> None:
    assert_plain(nest.map_many(lambda leaves: leaves[0], row.nest), row.plain)


def test_map_many_gives_one_new_list_with_the_leaves_in_the_order_of_the_nests(row: Row) -> None:
    lists: list = []
    nest.map_many(lists.append, row.nest, nest.map(lambda leaf: 0, row.nest), row.nest)
    assert len(lists) == len(row.leaves)
    assert all(type(each) is list for each in lists)
    assert all(
        same_objects(got, [leaf, 0, leaf]) for got, leaf in zip(lists, row.leaves, strict=True)
    )
    assert len({id(each) for each in lists}) == len(lists)


def test_map_many2_pairs_the_leaves_of_different_vector_and_map_types(row: Row) -> None:
    result = nest.map_many2(lambda a, b: a if a is b else "unequal", row.nest, row.plain)
    assert_plain(result, row.plain)


def test_pack_as_undoes_flatten(row: Row) -> None:
    assert_plain(nest.pack_as(row.nest, nest.flatten(row.nest)), row.plain)


def test_front_is_the_first_of_flatten_and_an_error_where_there_is_none(row: Row) -> None:
    if row.leaves:
        assert nest.front(row.nest) is row.leaves[0]
    else:
        with pytest.raises(
            ValueError,
            match=r"^Expected a nest with at least one leaf but got an empty (vector|map)",
        ):
            nest.front(row.nest)


def test_random_nests_agree_with_the_reference() -> None:
    rng = random.Random(0)
    leaves = 0
    for _ in range(300):
        n = random_nest(rng)
        assert nest.flatten(n) == reference_flatten(n)
        assert repr(nest.map(str, n)) == repr(reference_map(str, n))
        assert nest.map_many2(lambda a, b: a - b, n, n) == reference_map(lambda leaf: 0, n)
        assert nest.map_many(sum, n, n, n) == reference_map(lambda leaf: 3 * leaf, n)
        assert nest.pack_as(n, reference_flatten(n)) == reference_map(identity, n)
        leaves += len(nest.flatten(n))
    assert leaves > 300


def test_what_f_returns_is_a_leaf_even_when_it_is_a_nest() -> None:
    returned = [{"z": 1, "a": [2]}]
    assert nest.map(lambda leaf: returned, (1,))[0] is returned
    assert nest.map_many2(lambda a, b: returned, 1, 2) is returned
    assert nest.pack_as({"k": 0}, [returned])["k"] is returned


def test_the_given_nest_is_not_changed() -> None:
    n = {"b": [1, 2], "a": {"d": 3, "c": 4}}
    nest.map(str, n)
    assert repr(n) == "{'b': [1, 2], 'a': {'d': 3, 'c': 4}}"


def test_f_may_change_the_nest_that_is_being_mapped() -> None:
    n: dict = {"a": [1, 2], "b": 3}
    assert nest.map(lambda leaf: (n.clear(), leaf)[1], n) == {"a": (1, 2), "b": 3}


@pytest.mark.parametrize(
    ("f", "n", "result"),
    [
        (math.sqrt, (4.0,), (2.0,)),
        ("-".join, ["xy", {"k": "z"}], ("x-y", {"k": "z"})),
        ([1, 2, 1].count, {"k": 1}, {"k": 2}),
        (str, 3, "3"),
        (functools.partial(max, 5), (3, 7), (5, 7)),
        (Callable_(), (3,), (3,)),
        (np.negative, [np.int64(2)], (-2,)),
    ],
    ids=[
        "C function",
        "bound C method of a string",
        "bound C method of a list",
        "type",
        "partial",
        "object",
        "ufunc",
    ],
)
def test_f_is_any_callable(f: Callable[..., Any], n: Any, result: Any) -> None:
    assert nest.map(f, n) == result


# What is refused.


class Different(NamedTuple):
    """Two nests that differ, the message, and its addition about the place that differs."""

    a: Any
    b: Any
    text: str
    sides: str


DIFFERENT = {
    "shorter vector": Different(
        (1, 2),
        [1],
        "Expected vectors of same length but got 2 vs 1",
        "vector of length 2 vs vector of length 1",
    ),
    "longer vector": Different(
        (),
        (1, 2, 3),
        "Expected vectors of same length but got 0 vs 3",
        "vector of length 0 vs vector of length 3",
    ),
    "fewer keys": Different(
        {"a": 1},
        {},
        "Expected maps of same length but got 1 vs 0",
        "map with keys 'a' vs map without keys",
    ),
    "other keys": Different(
        {"a": 1, "k": 2},
        {"k": 1, "b": 1},
        "Expected maps to have same keys but found 'a' vs 'b'",
        "map with keys 'a', 'k' vs map with keys 'b', 'k'",
    ),
    "leaf vs tuple": Different(1, (1,), "nests don't match", "leaf vs vector of length 1"),
    "tuple vs leaf": Different((1,), 1, "nests don't match", "vector of length 1 vs leaf"),
    "leaf vs map": Different(1, {"a": 1}, "nests don't match", "leaf vs map with keys 'a'"),
    "() vs {}": Different((), {}, "nests don't match", "vector of length 0 vs map without keys"),
    "None vs ()": Different(None, (), "nests don't match", "leaf vs vector of length 0"),
}


@pytest.mark.parametrize("case", DIFFERENT.values(), ids=DIFFERENT.keys())
@pytest.mark.parametrize(
    ("around", "place"),
    [
        (lambda n: n, "the root"),
        (lambda n: {"obs": [0, n], "reward": 1}, "['obs'][1]"),
        (lambda n: (0, {"x": {"y": n}}), "[1]['x']['y']"),
    ],
    ids=["at the root", "in a map", "in a vector"],
)
def test_a_difference_is_named_with_its_place_and_both_sides(
    case: Different, around: Callable[[Any], Any], place: str
) -> None:
    a, b = around(case.a), around(case.b)
    called: list = []
    with pytest.raises(ValueError) as error2:
        nest.map_many2(lambda x, y: called.append(x), a, b)
    with pytest.raises(ValueError) as error_many:
        nest.map_many(called.append, a, a, b)
    assert str(error2.value) == str(error_many.value) == f"{case.text} at {place}: {case.sides}"
    assert called == [], "f must not be called for nests that differ"


def test_map_many_needs_a_nest() -> None:
    with pytest.raises(ValueError, match=r"^Expected at least one nest\.$"):
        nest.map_many(sum)


@pytest.mark.parametrize(
    ("n", "sequence", "message"),
    [
        ((1, 2), [1], "Too few elements in sequence: expected 2 but got 1"),
        (1, (), "Too few elements in sequence: expected 1 but got 0"),
        ({"a": 1}, "ab", "Nest didn't exhaust sequence: expected 1 but got 2"),
        ((), [None], "Nest didn't exhaust sequence: expected 0 but got 1"),
    ],
)
def test_pack_as_counts_both_sides(n: Any, sequence: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        nest.pack_as(n, sequence)


@pytest.mark.parametrize(
    "sequence",
    [[1, 2], (1, 2), range(1, 3), np.array([1, 2]), collections.deque([1, 2])],
    ids=lambda s: type(s).__name__,
)
def test_pack_as_takes_any_sequence(sequence: Any) -> None:
    assert nest.pack_as({"b": 0, "a": 0}, sequence) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "sequence", [(i for i in range(2)), {1, 2}, {"a": 1, "b": 2}, iter([1, 2]), 3, None]
)
def test_pack_as_refuses_what_is_no_sequence(sequence: Any) -> None:
    with pytest.raises(TypeError, match=r"^Expected a sequence such as a list or tuple but got "):
        nest.pack_as((0, 0), sequence)


def test_a_refused_generator_is_not_used_up() -> None:
    generator = (i for i in range(2))
    with pytest.raises(TypeError, match=r"but got generator; list\(\) makes one$"):
        nest.pack_as((0, 0), generator)
    assert list(generator) == [0, 1]


@pytest.mark.parametrize(
    ("n", "message"),
    [
        ({3: 1}, "found 3 of type int at the root"),
        ({"obs": [{"a": 1, b"b": 2}]}, "found b'b' of type bytes at ['obs'][0]"),
        ([{None: 1}], "found None of type NoneType at [0]"),
        ({("a", 1): 2}, "found ('a', 1) of type tuple at the root"),
    ],
)
def test_a_key_that_is_no_string_is_named_with_its_type_and_place(
    call: Callable[[Any], Any], n: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=re.escape(message) + "$"):
        call(n) if call is not CALLS["pack_as"] else nest.pack_as(n, [1, 2])


def test_a_key_that_is_no_text_is_an_error() -> None:
    with pytest.raises(UnicodeEncodeError):
        nest.flatten({"\ud800": 1})


class Mine(Exception):
    """An exception that only this test raises."""


@pytest.mark.parametrize(
    "raised", [Mine("mine"), ValueError("mine"), KeyboardInterrupt(), StopIteration(3)], ids=repr
)
def test_what_f_raises_passes_through_unchanged(raised: BaseException) -> None:
    def f(*leaves: Any) -> Any:
        raise raised

    for run in (
        lambda: nest.map(f, [1]),
        lambda: nest.map_many(f, {"a": 1}),
        lambda: nest.map_many2(f, 1, 1),
    ):
        with pytest.raises(type(raised)) as caught:
            run()
        assert caught.value is raised


def test_what_a_sequence_raises_passes_through_unchanged() -> None:
    class Broken(list):
        def __iter__(self) -> NoReturn:
            raise Mine

    with pytest.raises(Mine):
        nest.pack_as((0,), Broken([1]))


@pytest.mark.parametrize(
    "run",
    [
        lambda: nest.flatten(nest=1),
        lambda: nest.front(nest=1),
        lambda: nest.map(str, nest=1),
        lambda: nest.map(f=str, nest=1),
        lambda: nest.map_many(f=sum),
        lambda: nest.map_many2(max, 1, b=1),
        lambda: nest.pack_as((1,), sequence=[1]),
    ],
)
def test_arguments_are_positional(run: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        run()


@pytest.mark.parametrize(
    "run",
    [lambda: nest.map(3, ()), lambda: nest.map_many(3, ()), lambda: nest.map_many2(None, (), ())],
)
def test_an_f_that_cannot_be_called_is_refused_even_without_leaves(run: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        run()


# Depth.


def deep(levels: int, wrap: Callable[[Any], Any]) -> Any:
    n = "leaf"
    for _ in range(levels):
        n = wrap(n)
    return n


WRAPS = [lambda n: (n,), lambda n: [n], lambda n: {"k": n}]


@pytest.mark.parametrize("wrap", WRAPS, ids=["tuples", "lists", "dicts"])
def test_the_deepest_nest_works_on_a_small_stack(wrap: Callable[[Any], Any]) -> None:
    n = deep(nest.MAX_DEPTH, wrap)
    results: list = []

    def run() -> None:
        results.append(nest.flatten(n))
        results.append(nest.flatten(nest.map_many2(lambda a, b: a, n, nest.map(identity, n))))

    old = threading.stack_size(
        512 * 1024
    )  # The default of macOS, the smallest of the systems we support.
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(old)
    assert results == [["leaf"], ["leaf"]]


@pytest.mark.parametrize("wrap", WRAPS, ids=["tuples", "lists", "dicts"])
@pytest.mark.parametrize("levels", [nest.MAX_DEPTH + 1, later(100_000)])
def test_a_deeper_nest_raises(
    call: Callable[[Any], Any], wrap: Callable[[Any], Any], levels: int
) -> None:
    n = deep(levels, wrap)
    with pytest.raises(ValueError, match=f"^Expected a nest of at most {nest.MAX_DEPTH} levels"):
        call(n) if call is not CALLS["pack_as"] else nest.pack_as(n, [1])


def cyclic_nests() -> list:
    a: list = [1]
    a.append(a)
    b: dict = {"x": 1}
    b["self"] = b
    c: list = []
    c.append(({"back": c}, c))
    return [a, b, c]


@pytest.mark.parametrize("n", cyclic_nests(), ids=["list", "dict", "through three kinds"])
def test_a_nest_that_contains_itself_raises(call: Callable[[Any], Any], n: Any) -> None:
    with pytest.raises(ValueError, match="or one that contains itself, at "):
        call(n) if call is not CALLS["pack_as"] else nest.pack_as(n, [1])


# References.


class Leaf:
    """An object without other references."""


@pytest.mark.parametrize(
    "around", [lambda x: x, lambda x: (x,), lambda x: {"one": x, "two": [x, (x, {"k": x})]}]
)
def test_reference_counts_are_exact(
    around: Callable[[Any], Any], call: Callable[[Any], Any]
) -> None:
    leaf = Leaf()
    n = around(leaf)
    in_n = reference_flatten(n).count(leaf)
    before, n_before = sys.getrefcount(leaf), sys.getrefcount(n)
    result = call(n)
    kept = 1 if call is nest.front else in_n
    assert sys.getrefcount(leaf) == before + kept
    if n is not leaf:
        assert sys.getrefcount(n) == n_before
    del result
    assert sys.getrefcount(leaf) == before


def test_errors_release_every_reference() -> None:
    leaf, f = Leaf(), lambda *leaves: 1 / 0
    good, bad_key, cyclic = [leaf, {"k": leaf}], [leaf, {3: leaf}], [leaf]
    cyclic.append(cyclic)
    runs: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ZeroDivisionError, lambda: nest.map(f, good)),
        (ZeroDivisionError, lambda: nest.map_many(f, good, good)),
        (ZeroDivisionError, lambda: nest.map_many2(f, good, good)),
        (ValueError, lambda: nest.map_many2(f, good, [leaf, leaf])),
        (ValueError, lambda: nest.pack_as(good, [leaf])),
        (TypeError, lambda: nest.flatten(bad_key)),
        (ValueError, lambda: nest.flatten(cyclic)),
    ]
    watched = (leaf, f, good, bad_key, cyclic)
    before = [sys.getrefcount(each) for each in watched]
    for error, run in runs:
        for _ in range(10):
            with pytest.raises(error):
                run()
    gc.collect()
    assert [sys.getrefcount(each) for each in watched] == before


def test_calls_leave_no_container_behind() -> None:
    n = {"b": [Leaf(), (Leaf(), {"x": Leaf()})], "a": Leaf()}

    def call_all(times: int) -> int:
        """Returns the number of objects after the calls."""
        for call in CALLS.values():
            for _ in range(times):
                call(n)
        gc.collect()
        return len(gc.get_objects())

    before = call_all(1)
    assert call_all(100) - before < 50


# The documentation.


def test_the_docstrings_are_true_and_more_than_zero() -> None:
    names = {"flatten", "front", "map", "map_many", "map_many2", "pack_as"}
    tests = [test for test in doctest.DocTestFinder().find(nest, "nest") if test.examples]
    assert {test.name.removeprefix("nest.") for test in tests} >= names
    results = doctest.testmod(nest)
    assert results.attempted > len(names)
    assert results.failed == 0


def test_the_examples_of_the_readme_are_true() -> None:
    readme = pathlib.Path(__file__).parents[2] / "nest" / "README.md"
    results = doctest.testfile(str(readme), module_relative=False)
    assert results.attempted > 5
    assert results.failed == 0


def test_the_module_has_the_functions_that_its_stub_lists() -> None:
    stub = pathlib.Path(__file__).parents[2] / "nest" / "nest-stubs" / "__init__.pyi"
    listed = set(re.findall(r"^def (\w+)", stub.read_text(), re.MULTILINE)) | {"MAX_DEPTH"}
    assert listed == {name for name in dir(nest) if not name.startswith("_")}
