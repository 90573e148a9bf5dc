# SPDX-License-Identifier: Apache-2.0
"""The public names of the package, and its one version number."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchbeast

ROOT = Path(__file__).parents[2]
FOUND = pkgutil.walk_packages(torchbeast.__path__, "torchbeast.")
PACKAGES = ["torchbeast", *(found.name for found in FOUND if found.ispkg)]


@pytest.mark.parametrize("name", torchbeast.__all__)
def test_every_public_name_exists_and_has_a_docstring(name: str) -> None:
    found = getattr(torchbeast, name)
    assert found is not None and (name == "__version__" or found.__doc__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_lazy_name_of_a_package_is_what_type_checkers_read(package: str) -> None:
    """They read the TYPE_CHECKING block."""
    module = importlib.import_module(package)
    (path,) = module.__path__
    body = ast.parse((Path(path) / "__init__.py").read_text()).body
    lines = [line for node in body if isinstance(node, ast.If) for line in node.body]
    told = [line for line in lines if isinstance(line, ast.ImportFrom)]
    found = {alias.asname: f"{line.module}:{alias.name}" for line in told for alias in line.names}
    lazy = set(getattr(module, "__all__", ())) - set(vars(module))
    assert lazy == set(found) - {None}
    for name in lazy:
        assert getattr(module, name) is pkgutil.resolve_name(found[name]), name


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
