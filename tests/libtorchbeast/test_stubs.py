# SPDX-License-Identifier: Apache-2.0
"""_C.pyi agrees with the compiled module in names, arguments, defaults and bases."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import libtorchbeast
from libtorchbeast import _C

STUB = ast.parse(Path(libtorchbeast.__file__).with_name("_C.pyi").read_text())
Definition = ast.ClassDef | ast.FunctionDef
SPECIAL = {"__init__", "__iter__", "__next__", "__repr__"}


def definitions(body: list[ast.stmt]) -> dict[str, Definition]:
    return {node.name: node for node in body if isinstance(node, Definition)}


def public_names(members: dict[str, Any]) -> set[str]:
    return {name for name in members if not name.startswith("_")}


def own_methods(cls: type) -> set[str]:
    """Returns the methods of a compiled class, without those inherited from object."""
    return {name for name in vars(cls) if not name.startswith("_") or name in SPECIAL}


def parameters_of_stub(function: ast.FunctionDef) -> dict[str, Any]:
    """Returns the default of each argument; `inspect.Parameter.empty` if it has none."""
    arguments = function.args
    names = [argument.arg for argument in arguments.args]
    missing = [None] * (len(names) - len(arguments.defaults))
    defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
    names += [argument.arg for argument in arguments.kwonlyargs]
    pairs = zip(names, defaults, strict=True)
    return {name: _value(default) for name, default in pairs if name != "self"}


def _value(default: ast.expr | None) -> Any:
    return inspect.Parameter.empty if default is None else ast.literal_eval(default)


def parameters_of_compiled(function: Any) -> dict[str, Any]:
    """Returns the defaults in the signature that pybind11 writes into the docstring."""
    signature = function.__doc__.splitlines()[0]
    signature = re.sub(r"libtorchbeast\._C\.", "", signature)
    parsed = ast.parse(f"def {signature}: ...").body[0]
    assert isinstance(parsed, ast.FunctionDef)
    return parameters_of_stub(parsed)


STUBS = definitions(STUB.body)
METHODS = [
    (class_name, method)
    for class_name, node in STUBS.items()
    if isinstance(node, ast.ClassDef)
    for method in definitions(node.body)
]


def test_the_stub_lists_the_public_names_of_the_module() -> None:
    assert public_names(STUBS) == public_names(vars(_C))


def test_the_package_exports_all_names_of_the_stub() -> None:
    assert set(libtorchbeast.__all__) == public_names(vars(_C))
    assert all(getattr(libtorchbeast, name) is getattr(_C, name) for name in libtorchbeast.__all__)


def test_the_stub_lists_the_methods_of_each_class() -> None:
    compared = 0
    for name, node in STUBS.items():
        cls = getattr(_C, name)
        if not isinstance(node, ast.ClassDef) or issubclass(cls, Exception):
            continue
        methods = own_methods(cls) - {"__repr__"}
        if name == "Batch":  # is made by DynamicBatcher only
            methods -= {"__init__"}
        assert set(definitions(node.body)) == methods, name
        compared += 1
    assert compared == 8


@pytest.mark.parametrize(("class_name", "method"), METHODS)
def test_arguments_and_defaults_agree(class_name: str, method: str) -> None:
    node = definitions(STUBS[class_name].body)[method]
    assert isinstance(node, ast.FunctionDef)
    compiled = parameters_of_compiled(getattr(getattr(_C, class_name), method))
    stub = parameters_of_stub(node)
    if method in ("__iter__", "__next__"):
        assert stub == {}
    else:
        assert stub == compiled


@pytest.mark.parametrize("name", ["describe", "server_status"])
def test_arguments_and_defaults_of_functions_agree(name: str) -> None:
    node = STUBS[name]
    assert isinstance(node, ast.FunctionDef)
    assert parameters_of_stub(node) == parameters_of_compiled(getattr(_C, name))


def test_keyword_only_arguments_agree() -> None:
    for name in ("Credentials", "BatchingQueue", "ActorPool", "Server"):
        init = definitions(STUBS[name].body)["__init__"]
        assert isinstance(init, ast.FunctionDef)
        compiled = getattr(_C, name).__init__.__doc__.splitlines()[0]
        after_star = re.findall(r"(\w+):", compiled.split("*, ")[1])
        assert [argument.arg for argument in init.args.kwonlyargs] == after_star


def test_bases_of_exceptions_agree() -> None:
    compared = 0
    for name, node in STUBS.items():
        cls = getattr(_C, name)
        if isinstance(node, ast.ClassDef) and isinstance(cls, type) and issubclass(cls, Exception):
            assert [base.id for base in node.bases if isinstance(base, ast.Name)] == [
                base.__name__ for base in cls.__bases__
            ]
            compared += 1
    assert compared == 3


def test_everything_public_has_a_docstring() -> None:
    wordless = {"is_closed", "__iter__"}  # whose names say it all
    described = [(name, node) for name, node in STUBS.items()]
    for name, node in STUBS.items():
        if isinstance(node, ast.ClassDef):
            described += [(f"{name}.{m}", sub) for m, sub in definitions(node.body).items()]
    assert len(described) > 30
    missing = [
        name
        for name, node in described
        if not ast.get_docstring(node) and name.split(".")[-1] not in wordless
    ]
    assert missing == []
