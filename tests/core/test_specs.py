# SPDX-License-Identifier: Apache-2.0
"""A spec makes the same in another process, and what others wrote is never unpickled."""

from __future__ import annotations

import base64
import functools
import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from torchbeast.core.base.specs import ActorSpec, Spec, SpecError, check_takes, find_callable

HERE = Path(__file__).parent


def gridworld(size: int, wrap: bool = False, *, seed: int = 0) -> tuple[int, bool, int]:
    return size, wrap, seed


class Outer:
    @staticmethod
    def made() -> str:
        return "made"


def over_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "spec",
    [
        Spec("Catch"),
        Spec("my_module:make", {"size": 8, "goals": [[1, 2], [3, 4]], "wrap": None}),
        ActorSpec("mlp", {"hidden": 64}, use_lstm=True, reward_input="none", reads_values=False),
    ],
)
def test_a_spec_goes_through_json_both_ways(spec: Spec) -> None:
    sent = over_json(spec.as_json())
    assert type(spec).from_json(sent) == type(spec).from_parent(sent) == spec


def test_keyword_arguments_are_here_what_they_are_in_another_process() -> None:
    spec = Spec("any", {"shape": (2, 3)})
    assert spec.kwargs == {"shape": [2, 3]} == Spec.from_json(over_json(spec.as_json())).kwargs


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object(), print])
def test_keyword_arguments_that_are_no_json_are_refused_with_what_came(value: object) -> None:
    with pytest.raises(SpecError, match="^a:b: keyword arguments must be JSON .*, got .*'x'"):
        Spec("a:b", {"x": value})


# --- callables


def test_a_callable_of_a_module_is_named() -> None:
    assert Spec.of(gridworld, {"size": 3}) == Spec(f"{__name__}:gridworld", {"size": 3})
    assert Spec.of(Counter).load() is Counter
    assert Spec.of(Outer.made).load()() == "made"
    assert Spec.of("Catch") == Spec("Catch")


CHILD = """
import json, sys
from torchbeast.core.base.specs import Spec
spec = Spec.from_parent(json.loads(sys.argv[1]))
print(spec.name, spec.load()(**spec.kwargs))
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""


def in_a_child(spec: Spec) -> str:
    command = [sys.executable, "-c", CHILD, json.dumps(spec.as_json())]
    path = {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}"}
    return subprocess.run(
        command, env=path, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_a_named_callable_is_called_in_another_process() -> None:
    assert in_a_child(Spec("fractions:Fraction", {"numerator": 6, "denominator": 4})) == (
        "fractions:Fraction 3/2"
    )


def test_a_callable_that_no_name_imports_is_called_in_another_process() -> None:
    pytest.importorskip("cloudpickle")
    secret = 41

    def local(add: int) -> int:
        return secret + add

    spec = Spec.of(local, {"add": 1})
    assert in_a_child(spec).endswith("local 42")
    assert "pickled" not in repr(spec), "it is long"
    assert spec.load()(add=2) == 43


def test_what_cannot_be_pickled_is_refused_by_name() -> None:
    pytest.importorskip("cloudpickle")
    generator = (i for i in range(3))
    with pytest.raises(SpecError, match="lambda.* cannot be sent to another process: .*generator"):
        Spec.of(lambda: generator)


def test_without_cloudpickle_the_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        SpecError, match=r"lambda.* cannot be imported by name.*torchbeast\[cloudpickle\]"
    ):
        Spec.of(lambda: None)


# --- what others wrote


class Trap:
    """Is unpickled to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", [Spec, ActorSpec])
def test_a_pickled_callable_of_a_file_or_a_peer_is_refused(
    kind: type[Spec], tmp_path: Path
) -> None:
    bait = base64.b64encode(pickle.dumps(Trap(tmp_path / "sprung"))).decode()
    sent = {"name": "my_module:make", "pickled": bait}
    with pytest.raises(SpecError, match="my_module:make: a pickled callable is only accepted from"):
        kind.from_json(sent)
    assert not (tmp_path / "sprung").exists()
    kind.from_parent(sent).load()
    assert (tmp_path / "sprung").exists(), "else nothing was there to be refused"


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("Catch", "must be a JSON object with a name, got 'Catch'"),
        ({"kwargs": {}}, "must be a JSON object with a name, got {'kwargs': {}}"),
        ({"name": 3}, "must be a JSON object with a name, got {'name': 3}"),
        ({"name": "a", "kwargs": [8]}, r"a: keyword arguments must be JSON .*, got \[8\]"),
        ({"name": "a", "colour": 1}, "is not the JSON of a spec: .*unexpected .* 'colour'"),
    ],
)
def test_json_that_is_no_spec_is_refused_with_what_came(value: Any, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        Spec.from_json(value)


# --- names


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module:make", "no_such_module:make: there is no module no_such_module; install"),
        (f"{__name__}:gridwrold", "has no 'gridwrold'; did you mean gridworld"),
        (f"{__name__}:HERE", "HERE is .*, expected a function or class"),
        (":make", "'' is not the name of a module"),
        (".relative:make", "'.relative' is not the name of a module"),
        ("json:", "the module json has no ''"),
    ],
)
def test_an_unknown_name_is_refused_in_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence) as raised:
        find_callable(name)
    assert "\n" not in str(raised.value)


# --- keyword arguments that a callable takes


def test_keyword_arguments_that_are_taken_pass() -> None:
    check_takes(gridworld, {"size": 8}, "grid")
    check_takes(gridworld, {"size": 8, "wrap": True, "seed": 1}, "grid")
    check_takes(gridworld, {"seed": 1}, "grid", positional=1)
    check_takes(gridworld, {"seed": 1, "steps": 2}, "grid", ours=("size",), also=("steps",))
    check_takes(lambda **kwargs: kwargs, {"anything": 1}, "any")


@pytest.mark.parametrize(
    ("kwargs", "call", "sentence"),
    [
        (
            {"size": 8, "colour": "red"},
            {},
            "^grid: .*'colour'; it takes 'size', 'wrap', 'seed', got .*colour=\"red\"$",
        ),
        ({"size": 8}, {"positional": 1}, "^grid: .*'size'; it takes 'wrap', 'seed', got size=8$"),
        ({"size": 8}, {"ours": ("size",)}, "^grid: .*'size'; it takes 'wrap', 'seed', got size=8$"),
        ({}, {}, "^grid: missing .*'size'; it takes 'size', 'wrap', 'seed', got none$"),
        ({"wrap": True}, {}, "^grid: missing .*'size'; .* got wrap=true$"),
    ],
)
def test_others_are_refused_with_what_is_taken_and_what_came(
    kwargs: dict[str, Any], call: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SpecError, match=sentence):
        check_takes(gridworld, kwargs, "grid", **call)


def test_a_callable_that_takes_none_says_so() -> None:
    with pytest.raises(SpecError, match="^made: .*'size'; it takes nothing, got size=8$"):
        check_takes(Outer.made, {"size": 8}, "made")


class Maker:
    def __call__(self) -> None:
        pass


@pytest.mark.parametrize("source", [functools.partial(gridworld, 8), Maker()])
def test_the_name_of_an_object_is_the_same_in_every_process(source: Any) -> None:
    assert " at 0x" not in Spec.naming(source).name
