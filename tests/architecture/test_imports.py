# SPDX-License-Identifier: Apache-2.0
"""Components import each other only as the table in docs/contributing/architecture.md allows."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "torchbeast"
TABLE = ROOT / "docs" / "contributing" / "architecture.md"
MODULES = sorted(PACKAGE.rglob("*.py"))


class Row(NamedTuple):
    """The imports that a component is allowed."""

    components: list[str]
    packages: list[str]
    lazily: list[str]


class Import(NamedTuple):
    """One import of a module, by the full name of what is imported."""

    name: str
    line: int
    is_lazy: bool


def rows(text: str) -> dict[str, Row]:
    """Returns the rows of the table of components, low to high."""
    lines = iter(text.splitlines())
    assert any(line.startswith("| component |") for line in lines), (
        "there is no table of components"
    )
    next(lines)
    found = {}
    for line in lines:
        if not line.startswith("|"):
            break
        component, _, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[component] = Row(
            *([name.strip() for name in cell.split(",") if name] for cell in cells)
        )
    return found


ROWS = rows(TABLE.read_text())


def component_of(module: str) -> str:
    """Returns the innermost component of the module."""
    path = module.removeprefix("torchbeast.").replace(".", "/")
    fitting = [
        component for component in ROWS if path == component or path.startswith(f"{component}/")
    ]
    assert fitting, f"{module} is in no component of {TABLE.name}"
    return max(fitting, key=len)


@functools.cache
def imports(source: str) -> list[Import]:
    """Returns every import at any level; `from torchbeast import envs` imports torchbeast.envs."""
    nodes = [*ast.walk(ast.parse(source))]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {id(n) for f in nodes if isinstance(f, functions) for n in ast.walk(f)}
    return [
        Import(name, node.lineno, id(node) in inside)
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in names_in(node)
    ]


def names_in(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Returns the full names that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0 and node.module, "relative imports hide their component"
    bare = node.module == "torchbeast"
    return [f"torchbeast.{a.name}" for a in node.names] if bare else [node.module]


def not_allowed(component: str, row: Row, source: str) -> list[str]:
    """Returns the imports that the row does not allow, with their lines."""
    return [
        f"line {found.line} imports {found.name}"
        for found in imports(source)
        if not is_allowed(component, row, found)
    ]


def is_allowed(component: str, row: Row, found: Import) -> bool:
    package = found.name.partition(".")[0]
    if package in sys.stdlib_module_names:
        return True
    if package != "torchbeast":
        return package in row.packages or (found.is_lazy and package in row.lazily)
    if found.name == "torchbeast.__version__":  # a text in the package itself
        return True
    single = found.name.removeprefix("torchbeast.")
    return component_of(found.name) in (component, *row.components) or single in row.components


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


CHECKED = [path for path in MODULES if path != PACKAGE / "__init__.py"]


def test_modules_import_what_the_rows_of_their_components_allow() -> None:
    found = {}
    for path in CHECKED:
        component = component_of(module_name(path))
        found[path] = not_allowed(component, ROWS[component], path.read_text())
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_a_row_names_only_components_above_it_so_there_is_no_cycle() -> None:
    seen: list[str] = []
    for component, row in ROWS.items():
        higher = [name for name in row.components if name not in seen and "." not in name]
        assert not higher, f"{component} imports {higher}, which stand below it in the table"
        seen.append(component)
    assert len(seen) > 15


def test_a_single_module_that_a_row_names_imports_nothing_of_ours() -> None:
    singles = [name for row in ROWS.values() for name in row.components if "." in name]
    assert singles
    for name in singles:
        source = (PACKAGE / f"{name.replace('.', '/')}.py").read_text()
        assert not_allowed(name, Row([], [], []), source) == []


def modules_in(source: str) -> set[str]:
    """Returns our modules that are imported anywhere: in functions and for types alone, too."""
    known = {module_name(path) for path in MODULES}
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner if inner & known else {str(node.module)}
    return names & known


def test_modules_import_each_other_in_no_circle_not_even_lazily_or_for_types() -> None:
    graph = {module_name(path): modules_in(path.read_text()) for path in CHECKED}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_every_component_of_the_table_exists() -> None:
    components = {component_of(module_name(path)) for path in CHECKED}
    assert components == set(ROWS)


def test_no_component_below_cli_imports_it() -> None:
    below = list(ROWS)[: list(ROWS).index("cli")]
    assert "run" in below and "core" in below
    assert not [component for component in below if "cli" in ROWS[component].components]


def test_only_these_modules_import_ray() -> None:
    importing = [
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        if any(found.name.partition(".")[0] == "ray" for found in imports(path.read_text()))
    ]
    files = ("connection", "fleet", "replay")
    assert importing == [f"on_ray/{file}.py" for file in files]


@pytest.mark.parametrize(
    ("source", "allowed"),
    [
        ("import os, numpy", True),
        ("import torch", False),
        ("def f():\n    import torch", True),
        ("def f():\n    import gymnasium", False),
        ("from torchbeast import errors", True),
        ("from torchbeast import learner", False),
        ("from torchbeast.core.base.nest import flatten", True),
        ("from torchbeast.core import losses", False),
        ("def f():\n    from torchbeast.cli import flags", False),
        ("if TYPE_CHECKING:\n    from torchbeast.cli import flags", False),
    ],
)
def test_the_check_finds_imports_at_any_level_of_a_module(source: str, allowed: bool) -> None:
    row = Row(["errors", "core.base.nest"], ["numpy"], ["torch"])
    assert (not_allowed("seeds", row, source) == []) == allowed


CONFIGS = [path for path in MODULES if path.name == "config.py"]
SPECS = ("torchbeast.core.base.specs", "torchbeast.envs.spec")  # have Configs too


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        (["torchbeast"], ["numpy", "torch", "torchbeast.core.base.specs"]),
        ([*map(module_name, CONFIGS), *SPECS], ["torch", "libtorchbeast", "tyro"]),
        (
            [
                "torchbeast.servers.server_main",
                "torchbeast.envs.env_worker",
                "torchbeast.fleets.local_main",
            ],
            ["torch", "libtorchbeast"],
        ),
        (["torchbeast.collect.contract", "torchbeast.reporting.diagnosis"], ["torch"]),
        (
            ["torchbeast.raybeast", "torchbeast.on_ray.fleet"],
            [
                *("ray", "libtorchbeast", "nest", "torchbeast.collect.worker"),
                *("torchbeast.gradients", "torchbeast.servers", "torchbeast.collect.shared_replay"),
            ],
        ),
        (
            ["torchbeast.monobeast"],
            [
                *("torchbeast.core.actors.off_policy", "torchbeast.core.update.torch_ranks"),
                *("torchbeast.evaluation.play", "torchbeast.run.replay"),
                *("torchbeast.run.replicas", "torchbeast.schemes", "torchbeast.collect.local"),
                *("torchbeast.collect.replayed", "torchbeast.servers", "torchbeast.envs.atari"),
                *("torchbeast.collect.worker", "torchbeast.core.storages.replay"),
                *("torchbeast.gradients", "torchbeast.on_ray", "torchbeast.collect.shared_replay"),
            ],
        ),
        (
            ["torchbeast.learner.learner"],
            [
                *("torchbeast.core.update.torch_ranks", "torchbeast.run.replicas"),
                *("torchbeast.on_ray.fleet", "torchbeast.gradients.worker"),
                *("torchbeast.collect.replayed", "torchbeast.collect.shared_replay"),
                *("torchbeast.collect.local", "torchbeast.collect.source"),
            ],
        ),
    ],
)
def test_a_module_loads_only_what_its_side_needs(imported: list[str], unwanted: list[str]) -> None:
    code = f"import sys\nimport {', '.join(imported)}\n"
    code += f"print([name for name in {unwanted} if name in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.strip() == "[]"
    assert len(CONFIGS) > 5


IN_CHILDREN = {
    "torchbeast.envs.env_worker",
    "torchbeast.collect.worker",
    "torchbeast.servers.server_main",
}


def test_only_modules_of_child_processes_make_environments_in_their_process() -> None:
    """Environments fork, and set signal handlers: no program may run them itself."""
    importing = {
        module_name(path) for path in MODULES if "import make_environment" in path.read_text()
    }
    assert importing == IN_CHILDREN
