# SPDX-License-Identifier: Apache-2.0
"""The public names of the package, and its one version number."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torchbeast

ROOT = Path(__file__).parents[2]
PUBLIC = [
    "torchbeast",
    "torchbeast.core.actors",
    "torchbeast.core.algos",
    "torchbeast.core.envs",
    "torchbeast.core.storages",
    "torchbeast.envs",
    "torchbeast.learner",
    "torchbeast.reporting",
    "torchbeast.schemes",
]
FUNCTIONS = [
    "torchbeast.core.algos.unroll",
    "torchbeast.core.base.checks",
    "torchbeast.core.base.nest",
    "torchbeast.core.losses",
    "torchbeast.core.returns",
    "torchbeast.core.vtrace",
]


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_exists_and_has_a_docstring(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert name == "__version__" or getattr(module, name).__doc__, name


@pytest.mark.parametrize("package", PUBLIC)
def test_completion_and_type_checkers_know_every_public_name(package: str) -> None:
    """Type checkers read what a package defines, and its imports, also those for them alone."""
    module = importlib.import_module(package)
    assert module.__file__
    tree = ast.parse(Path(module.__file__).read_text())
    lines = [line for line in ast.walk(tree) if isinstance(line, ast.ImportFrom)]
    imported = {alias.asname or alias.name for line in lines for alias in line.names}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assigned = [node.targets[0] for node in tree.body if isinstance(node, ast.Assign)]
    defined |= {target.id for target in assigned if isinstance(target, ast.Name)}
    assert set(module.__all__) <= imported | defined
    assert set(module.__all__) <= set(dir(module))


def imports_in(text: str) -> set[tuple[str, str]]:
    """Returns the modules and names that a file, a notebook or a page imports from torchbeast."""
    found = re.findall(r"from (torchbeast[\w.]*) import ([\w, ]+)", text)
    return {(module, name.strip()) for module, names in found for name in names.split(",")}


def test_readme_docs_and_examples_import_public_names_only() -> None:
    contributing = ROOT / "docs" / "contributing"
    pages = [page for page in (ROOT / "docs").rglob("*.md") if contributing not in page.parents]
    paths = [ROOT / "README.md", *pages, *(ROOT / "examples").glob("*.[pi]*")]
    found = set[tuple[str, str]]().union(*(imports_in(path.read_text("utf-8")) for path in paths))
    modules = {package: importlib.import_module(package) for package in PUBLIC}
    known = {(package, name) for package in PUBLIC for name in modules[package].__all__}
    unknown = {(module, name) for module, name in found - known if module not in FUNCTIONS}
    assert len(found) > 15
    assert {".".join(imported) for imported in unknown} <= set(FUNCTIONS)


def test_the_readme_names_everything_that_is_stable() -> None:
    status = (ROOT / "README.md").read_text("utf-8").partition("## Status")[2]
    named = re.findall(r"`(torchbeast\.[\w.]*)(?:\{([\w,]+)\})?`", status)
    found = {f"{start}{end}" for start, ends in named for end in ends.split(",")}
    assert found == {"torchbeast.__all__", *PUBLIC[1:], *FUNCTIONS}


def public_callables(module: str) -> Iterator[tuple[str, Any]]:
    """Yields the public functions, classes and methods of a module, by name."""
    found = vars(importlib.import_module(module))
    names = found.get("__all__") or [
        name for name, value in found.items() if getattr(value, "__module__", "") == module
    ]
    for name in names:
        value = getattr(sys.modules[module], name)
        if inspect.isfunction(value) and not name.startswith("_"):
            yield name, value
        if inspect.isclass(value):
            yield name, value
            methods = [method for method in vars(value) if not method.startswith("_")]
            yield from ((f"{name}.{method}", getattr(value, method)) for method in methods)


@pytest.mark.parametrize("module", [*PUBLIC, *FUNCTIONS])
def test_a_public_function_with_several_arguments_describes_them(module: str) -> None:
    """The fields of a Config are described by their help texts."""
    missing = []
    for name, found in public_callables(module):
        is_error = inspect.isclass(found) and issubclass(found, Exception)
        if not callable(found) or is_error or name.endswith(("Config", "Options")):
            continue
        of_class = f"{found.__init__.__doc__}" if inspect.isclass(found) else ""
        described = re.search("(Args|Attributes):\n", f"{inspect.getdoc(found)}{of_class}")
        parameters = inspect.signature(found).parameters.keys() - {"self", "args", "kwargs"}
        if len(parameters) > 1 and not described:
            missing.append(name)
    assert not missing


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = torchbeast.no_such_name
    with pytest.raises(ImportError):
        exec("from torchbeast import no_such_name")


def test_a_star_import_and_dir_give_the_public_names() -> None:
    taken: dict[str, object] = {}
    exec("from torchbeast import *", taken)
    assert set(torchbeast.__all__) <= set(taken)
    assert dir(torchbeast) == sorted(torchbeast.__all__)
    assert 20 <= len(torchbeast.__all__) <= 35


def test_public_names_of_environments_need_no_torch() -> None:
    code = (
        "import sys; from torchbeast import EnvSpec, UsageError, VecEnv, make_env; "
        "make_env('Catch', 1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_takes_the_place_of_the_first_versions_modules_can_be_imported() -> None:
    (table,) = re.findall(r"\| first version .*", (ROOT / "CHANGELOG.md").read_text(), re.DOTALL)
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    told = re.findall(r"`((?:lib)?torchbeast\.[\w.]+)", " ".join(now for _, now in rows))
    assert len(rows) == 8 and len(told) >= 12
    assert all(callable(pkgutil.resolve_name(name)) for name in told)


def test_there_is_one_version_number() -> None:
    """The wheel and the citation have the version of the package."""
    project = (ROOT / "pyproject.toml").read_text()
    assert 'version = { attr = "torchbeast.__version__" }' in project
    assert not re.search(r'^version = "', project, re.MULTILINE)
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited and cited[1] == torchbeast.__version__


def test_an_installed_package_has_the_version_of_its_source() -> None:
    try:
        installed = importlib.metadata.distribution("torchbeast")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchbeast is not installed")
    if installed.locate_file("torchbeast/__init__.py") != ROOT / "torchbeast" / "__init__.py":
        pytest.skip("another torchbeast is installed")
    assert installed.version == torchbeast.__version__


def test_a_wheel_has_the_zoo_and_stubs_but_no_sources_of_the_core(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", "77")
    places = ["egg_info", "--egg-base", str(tmp_path), "build_py", "--build-lib", f"{tmp_path}/lib"]
    command = [sys.executable, "setup.py", "-q", *places]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    packed = {str(path.relative_to(tmp_path / "lib")) for path in (tmp_path / "lib").rglob("*.*")}
    assert {"torchbeast/zoo/agents/catch-impala.pt", "libtorchbeast/_C.pyi"} <= packed
    assert not [path for path in packed if path.endswith((".cc", ".h"))]
