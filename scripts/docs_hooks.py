# SPDX-License-Identifier: Apache-2.0
"""Hooks of mkdocs.yml: generated pages of the reference, and links to files outside docs/.

The command lines come from the dataclasses that `--help` reads, the presets from the zoo's
presets.ini, and the Python API from the names that the public packages export. `make docs` builds
strictly, so every warning here ends the build.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import itertools
import logging
import posixpath
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
INCLUDED = {"changelog.md": "CHANGELOG.md", "contributing/index.md": "CONTRIBUTING.md"}
"""Pages of the site that are files of the repository's root."""
MODULES = (  # all their functions and classes are public
    "torchbeast.core.losses",
    "torchbeast.core.returns",
    "torchbeast.core.vtrace",
    "torchbeast.core.algos.unroll",
    "torchbeast.core.base.checks",
    "torchbeast.core.base.nest",
)
PACKAGES = (  # a name is documented on the page of the first package that exports it
    "torchbeast.learner",
    "torchbeast.schemes",
    "torchbeast.reporting",
    "torchbeast.envs",
    "torchbeast.core.envs",
    "torchbeast.core.actors",
    "torchbeast.core.algos",
    "torchbeast.core.storages",
    "torchbeast",
)
SOURCES = {
    "torchbeast/cli/learner_flags.py": "reference/command-line.md",
    "torchbeast/zoo/presets.ini": "reference/presets.md",
    **{name.replace(".", "/"): f"reference/api/{name}.md" for name in PACKAGES},
    **{source: page for page, source in INCLUDED.items()},
}
"""Pages of the site that are made from these files. Links to the files lead to the pages, so that
they also work in the repository.
"""
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
_NAMED_PAGE = re.compile(r"docs/((?:[\w-]+/)*[\w-]+\.md)")
_FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*(?=[^<>]*</code>)")
_log = logging.getLogger("mkdocs.hooks.docs")  # strict builds count warnings of mkdocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    pages = {page: (ROOT / source).read_text("utf-8") for page, source in INCLUDED.items()}
    pages["reference/command-line.md"] = command_line()
    pages["reference/presets.md"] = presets()
    pages.update(python_api())
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Makes links to files outside docs/, and to folders, lead to the repository."""
    source = INCLUDED.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def linked(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        link = link_to(path, page.file.src_uri, config.extra["repository"])
        return match[0] if link is None else link + (match[2] or "")

    return _LINK.sub(linked, markdown)


def link_to(path: str, page: str, repository: str) -> str | None:
    """Returns a page's link to a file or folder of the repository; None if it does not exist.

    Args:
        path: of the file or folder, from the repository's root.
        page: that has the link, from docs/.
        repository: its address.
    """
    if path in SOURCES:
        return posixpath.relpath(SOURCES[path], posixpath.dirname(page) or ".")
    if path.startswith("docs/") and (ROOT / path).is_file():
        return posixpath.relpath(path.removeprefix("docs/"), posixpath.dirname(page) or ".")
    if not (ROOT / path).exists():  # MkDocs warns, unless it is a generated page
        return None
    return f"{repository.rstrip('/')}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keeps flags whole, and makes the pages that docstrings and help texts name into links."""
    html = _FLAG.sub(r'<span class="flag">\g<0></span>', html)  # browsers break after a hyphen
    if not page.file.src_uri.startswith(("reference/api/", "reference/command-line")):
        return html

    def linked(match: re.Match[str]) -> str:
        if (found := files.get_file_from_path(match[1])) is None:
            _log.warning("%s names %s, which does not exist", page.file.src_uri, match[0])
            return match[0]
        return f'<a href="{found.url_relative_to(page.file)}">{match[0]}</a>'

    return _NAMED_PAGE.sub(linked, html)


# ---- Command lines and presets -------------------------------------------------------------------


def programs() -> dict[str, type]:
    """Returns the dataclass of every program's flags, by the program's name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from bench.flags import BenchFlags

    from torchbeast.sweep.config import SweepConfig

    sources = (ROOT / "torchbeast").glob("*.py")
    names = [path.stem for path in sources if '__name__ == "__main__"' in path.read_text("utf-8")]
    found: dict[str, type] = {"bench": BenchFlags, "sweep": SweepConfig}
    for name in {*names} - {*found, "__main__"}:  # which only calls the others
        module = importlib.import_module(f"torchbeast.{name}")
        flags = name.replace("_", "") + "flags"  # of polybeast_env PolyBeastEnvFlags
        (found[name],) = (kind for each, kind in vars(module).items() if each.lower() == flags)
    return dict(sorted(found.items()))


def command_line() -> str:
    """Returns the page of all programs' flags."""
    from torchbeast.cli.learner_flags import LearnerFlags
    from torchbeast.core.algos import registry
    from torchbeast.core.algos.config import usual_of

    every = {name: group for name, group in groups(LearnerFlags) if name != "algorithm"}
    lines = [
        "# Command lines",
        "",
        _INTRODUCTION,
        "",
        "| program | what it does |",
        "| --- | --- |",
    ]
    found = programs()
    lines += [f"| [`{name}`](#{name}) | {_cell(_first(flags))} |" for name, flags in found.items()]
    for program, flags in found.items():
        about = [_cell(each) for each in (inspect.getdoc(flags) or "").split("\n\n")]
        lines += ["", f"## {program}", "", f"`python -m torchbeast.{program}`"]
        lines += ["", "\n\n".join(about)]
        own = dict(groups(flags))
        if issubclass(flags, LearnerFlags):
            unused = [_title(name) for name in every if name not in own]
            without = f", without the groups {', '.join(unused)}" if unused else ""
            lines += ["", f"{_HAS_TOO}{without}."]
            shared = {"algorithm": own.get("algorithm"), **every}
            own = {name: group for name, group in own.items() if group is not shared.get(name)}
        for name, group in own.items():
            heading = ["", f"### {_title(name)} {{ #{program}-{name} }}", *_purpose(group)]
            lines += [*([] if group is flags else heading), *_table(group)]
    lines += ["", "## Flags of every learner program", "", _OF_LEARNERS]
    for name, group in every.items():
        lines += ["", f"### {_title(name)} {{ #{name} }}", *_purpose(group), *_table(group)]
    lines += ["", "## Settings of the algorithms", "", _OF_ALGORITHMS]
    for algo in registry.ALGOS:
        config = registry.config_of(algo)
        usual = " ".join(f"`--{name} {value}`" for name, value in usual_of(config).items())
        lines += ["", f"### --algo {algo}", *_purpose(config), *_table(config)]
        lines += ["", f"It changes these defaults: {usual}."] if usual else []
    return "\n".join(lines) + "\n"


_INTRODUCTION = """Each program is a module, and `--help` prints its flags with their defaults.
You can write a flag with underscores or with dashes (`--num_envs`, `--num-envs`). A flag whose
value is *switch* is true or false; `--NAME` alone turns it on, and `--no_NAME` turns it off, for
example when you resume a run that had it on."""
LINK_TO_SHARED = "(#flags-of-every-learner-program)"
_HAS_TOO = f"""In addition to the flags below, it has the [flags of every learner
program]{LINK_TO_SHARED} and the [settings of its algorithm](#settings-of-the-algorithms)"""
_OF_LEARNERS = """`monobeast`, `polybeast`, `polybeast_learner` and `raybeast` have these flags. A
[preset](presets.md), an algorithm, or a run that you resume may change the defaults."""
_OF_ALGORITHMS = """`--algo NAME` adds the settings of one algorithm to the flags of a learner
program."""


def groups(flags: type) -> Iterator[tuple[str, Any]]:
    """Yields the name and the dataclass of every group of flags that a program shows."""
    hints = typing.get_type_hints(flags, include_extras=True)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(flags)}
    if not all(dataclasses.is_dataclass(_bare(hint)) for hint in fields.values()):
        yield "flags", flags
        return
    for name, hint in fields.items():
        if tyro.conf.Suppress not in getattr(hint, "__metadata__", ()):
            yield name, _bare(hint)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _purpose(group: type) -> Iterator[str]:
    yield from ("", _cell(inspect.getdoc(group) or ""))


def _table(group: type) -> Iterator[str]:
    yield from ("", "| flag | value | meaning |", "| --- | --- | --- |")
    yield from _rows(group)


def _rows(group: type, chosen: Any = None) -> Iterator[str]:
    """Yields a row for every flag of a group. Defaults are the values of `chosen`, if given."""
    hints, told = typing.get_type_hints(group, include_extras=True), dict(field_docs(group))
    for field in dataclasses.fields(group):
        hint = hints[field.name]
        default = _default_of(field) if chosen is None else getattr(chosen, field.name)
        if dataclasses.is_dataclass(_bare(hint)):
            yield from _rows(_bare(hint), default)
            continue
        is_word = tyro.conf.Positional in getattr(hint, "__metadata__", ())
        flag = f"`{field.name.upper()}`" if is_word else f"`--{field.name}`"
        meaning = _cell(told.get(field.name, ""))
        shown = "" if "Default:" in meaning else _value(default)
        yield f"| {flag} | {_kind(hint)}{shown} | {meaning} |"


def field_docs(group: type) -> Iterator[tuple[str, str]]:
    """Yields the docstring below each field of a dataclass and of its bases."""
    for base in reversed(group.__mro__[:-1]):
        body = classes_of(base.__module__)[base.__name__].body
        for field, below in itertools.pairwise(body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=t)):
                    yield name, str(t)


@functools.cache
def classes_of(module: str) -> dict[str, ast.ClassDef]:
    """Returns the source of a module's classes, by name."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _kind(hint: Any) -> str:
    """Returns what a flag takes, as a word: `int`, or the values of a choice."""
    from torchbeast.cli.command_line import KWARGS

    hint = _bare(hint)
    if hint == KWARGS:
        return "JSON"
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(arg) for arg in args if arg is not type(None))
    if origin is typing.Literal:
        return ", ".join(f"`{arg}`" for arg in args)
    if origin is tuple:
        return f"{_kind(args[0])} ..."
    return "switch" if hint is bool else str(hint.__name__)


def _default_of(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _value(default: Any) -> str:
    if isinstance(default, bool):
        return ", default on" if default else ""
    is_empty = default in (dataclasses.MISSING, None, (), {}, "")
    return "" if is_empty else f", default `{default}`"


def _first(documented: Any) -> str:
    """Returns the first sentence of a docstring."""
    text = " ".join((inspect.getdoc(documented) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[\w)])\. (?=[A-Z])", text)[0].removesuffix(".")


def _title(group: str) -> str:
    return group.replace("_", " ").capitalize()


def _cell(text: str) -> str:
    """Returns a text for a table's cell, with flags as code."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    return re.sub(r"(?<![`\w-])--?[a-z][\w]*", lambda match: f"`{match[0]}`", text)


def presets() -> str:
    """Returns the page of the presets."""
    from torchbeast.zoo import PRESETS

    lines = ["# Presets", "", _OF_PRESETS]
    for family, of_family in itertools.groupby(PRESETS, lambda name: PRESETS[name].family):
        lines += ["", f"## {family}"]
        for name in of_family:
            flags = [f"`{flag}`" for flag in re.split(" (?=--)", PRESETS[name].words)]
            lines += ["", f"### {name}", "", PRESETS[name].sentence, "", ", ".join(flags)]
    return "\n".join(lines) + "\n"


_OF_PRESETS = """A preset is a set of defaults that belong together. `--preset NAME` works with
every learner program, `--preset help` lists them, and a flag on the command line overrides its
preset:

```shell
python -m torchbeast.monobeast --preset cartpole-impala --total_steps 500000
```

The [results](../results/README.md) say what each preset reaches."""


# ---- Python API ----------------------------------------------------------------------------------


def python_api() -> dict[str, str]:
    """Returns the pages of the Python API; warns of public names without a docstring."""
    homes = {id(importlib.import_module(name)): name for name in MODULES}
    pages = {name: _module_page(name) for name in MODULES}
    pages.update({package: _package_page(package, homes) for package in PACKAGES})
    return {f"reference/api/{name}.md": page for name, page in pages.items()}


def _module_page(name: str) -> str:
    module = importlib.import_module(name)
    for each, found in vars(module).items():
        if not each.startswith("_") and getattr(found, "__module__", None) == name:
            check_documented(f"{name}.{each}", found)
    return f"::: {name}\n    options: {{heading: {name}, heading_level: 1}}\n"


def _package_page(package: str, homes: dict[int, str]) -> str:
    """Returns the page of a package, and adds to `homes` where its names are documented."""
    module = importlib.import_module(package)
    public = {name: public_name(module, name) for name in module.__all__ if name[0] != "_"}
    paths = {name: path_of(package, name, found) for name, found in public.items()}
    for name in sorted(public, key=lambda name: name != public[name].__name__):  # aliases last
        homes.setdefault(id(public[name]), paths[name])
    names = sorted(public, key=str.lower)
    lines = [
        f"# {package}",
        "",
        f"{_cell(_first(module))}.",
        "",
        "| name | what it is |",
        "| --- | --- |",
    ]
    for name in names:
        home = homes[id(public[name])]
        lines += [f"| [`{name}`][{home}] | {_cell(_first(public[name]))} |"]
    for name in names:
        if homes[id(public[name])] == paths[name]:
            check_documented(f"{package}.{name}", public[name])
            lines += ["", f"::: {paths[name]}", *_class_methods(public[name])]
    return "\n".join(lines) + "\n"


def public_name(module: types.ModuleType, name: str) -> Any:
    """Returns what a package exports, even if a submodule of the same name has been imported."""
    found = getattr(module, name)
    return module.__getattr__(name) if isinstance(found, types.ModuleType) else found


def path_of(package: str, name: str, found: Any) -> str:
    """Returns the path by which mkdocstrings finds what a package exports.

    At `torchbeast.export` it would find the submodule, so the function has its definition's path.
    """
    is_submodule = importlib.util.find_spec(f"{package}.{name}") is not None
    return f"{found.__module__}.{found.__name__}" if is_submodule else f"{package}.{name}"


def _class_methods(found: Any) -> Iterator[str]:
    """Yields the class methods that a Protocol has from its metaclass, such as create_factory."""
    meta = type(found)
    if isinstance(found, type) and meta.__module__.startswith("torchbeast."):
        for each in (each for each in vars(meta) if not each.startswith("_")):
            yield from ("", f"::: {meta.__module__}.{meta.__qualname__}.{each}")
            yield f"    options: {{heading: {found.__name__}.{each}, heading_level: 3}}"


def check_documented(name: str, found: Any) -> None:
    """Warns if a public name, or a public method that its class defines, has no docstring."""
    members = vars(found) if isinstance(found, type) else {}
    methods = {f"{name}.{each}": getattr(found, each) for each in members if each[0] != "_"}
    public = {name: found, **{each: made for each, made in methods.items() if callable(made)}}
    for each, documented in public.items():
        text = inspect.getdoc(documented)
        # Python gives a dataclass without a docstring its signature for one.
        if not text or text.startswith(f"{found.__name__}("):
            _log.warning("%s is public and has no docstring: write one", each)
