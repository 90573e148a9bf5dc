# SPDX-License-Identifier: Apache-2.0
"""The reference that scripts/docs_hooks.py generates, and the links of all pages.

`make docs` checks the rest: it builds the site and fails at a warning.
"""

from __future__ import annotations

import importlib
import re
import sys
import textwrap
from collections.abc import Iterator
from os.path import normpath
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import pytest

import torchbeast
from torchbeast.cli.command_line import flag_names
from torchbeast.core.algos.registry import ALGOS
from torchbeast.zoo import PRESETS

ROOT = Path(__file__).parents[1]
ADDRESS = "https://example.org/repository"


@pytest.fixture(name="hooks", scope="module")
def _hooks() -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    import docs_hooks

    return docs_hooks


CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*?)(?: \{ #([\w.-]+) \})?$", re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def pages_of(hooks: ModuleType) -> dict[str, str]:
    """Returns the text of every page, also of generated ones, by its path in the repository."""
    files = [
        *ROOT.glob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    pages = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}
    generated = {
        "reference/command-line.md": hooks.command_line(),
        "reference/presets.md": hooks.presets(),
        **hooks.python_api(),
    }
    return pages | {f"docs/{page}": text for page, text in generated.items()}


def anchors_of(text: str) -> Iterator[str]:
    """Yields the anchors of a page, as Python-Markdown makes them from headings."""
    fences = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
    for heading, anchor in HEADING.findall(fences.sub("", text)):
        shown = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        words = re.sub(r"[^\w\s-]", "", shown).strip().lower()
        yield anchor or re.sub(r"[-\s]+", "-", words)
    yield from re.findall(r"(?:^::: |id=\")([\w.-]+)", text, re.MULTILINE)


def broken_links(pages: dict[str, str]) -> Iterator[str]:
    """Yields the links that lead to no file or folder, or to no heading of a page."""
    anchors = {page: set(anchors_of(text)) for page, text in pages.items()}
    for page, text in pages.items():
        for path, anchor in LINK.findall(CODE.sub("", text)):
            target = normpath(Path(page).parent / path) if path else page
            exists = target in pages or (ROOT / target).exists()
            if not exists or (anchor and target in pages and anchor not in anchors[target]):
                yield f"{page}: {path}{anchor and '#'}{anchor}"


def test_every_link_of_a_page_leads_to_a_file_and_a_heading(hooks: ModuleType) -> None:
    pages = pages_of(hooks)
    assert sum(len(LINK.findall(text)) for text in pages.values()) > 300
    assert list(broken_links(pages)) == []


def test_every_link_also_works_in_the_repository_without_the_pages_of_the_site(
    hooks: ModuleType,
) -> None:
    files = {page: text for page, text in pages_of(hooks).items() if (ROOT / page).exists()}
    assert len(files) > 40
    assert list(broken_links(files)) == []


def test_every_page_that_a_docstring_or_message_names_exists(hooks: ModuleType) -> None:
    folders = ("torchbeast", "libtorchbeast", "benchmarks", "examples")
    sources = [file for folder in folders for file in (ROOT / folder).rglob("*.*")]
    code = [file.read_text("utf-8") for file in sources if file.suffix in (".py", ".h", ".cc")]
    named = {page for text in code for page in re.findall(r"\bdocs/[\w/-]+\.md\b", text)}
    assert len(named) > 5
    assert named - pages_of(hooks).keys() == set()


def test_no_blank_line_divides_a_table() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        text = CODE.sub("", page.read_text("utf-8"))
        assert not re.search(r"^\|.*\n\n\|(?!.*\n\| ?-)", text, re.MULTILINE), page


def test_a_link_to_a_missing_file_or_heading_is_found() -> None:
    pages = {
        "docs/a.md": "# One\n[x](b.md#two-words) [x](#one) [x](../Makefile) `[x](in-code.md)`",
        "docs/b.md": "## Two `words`\n[x](a.md#two) [x](#none) [x](c.md)\n```\n# Two\n```",
    }
    assert list(broken_links(pages)) == [
        "docs/b.md: a.md#two",
        "docs/b.md: #none",
        "docs/b.md: c.md",
    ]


def test_the_page_of_command_lines_has_every_flag_of_every_program(hooks: ModuleType) -> None:
    page = hooks.command_line()
    sections = dict(re.findall(r"^## (\S.*)\n((?:(?!## ).*\n)*)", page, re.MULTILINE))
    shared = sections["Flags of every learner program"] + sections["Settings of the algorithms"]
    for program, flags_type in hooks.programs().items():
        text = sections[program] + (shared if hooks.LINK_TO_SHARED in sections[program] else "")
        told = set(re.findall(r"^\| `(?:--)?(\w+)`", text, re.MULTILINE))
        told |= {name.lower() for name in told}  # words are written in capitals
        if program != "bench":  # which hides groups of flags
            assert set(flag_names(flags_type)) <= told, program


def test_the_page_of_command_lines_has_the_defaults_of_nested_settings(hooks: ModuleType) -> None:
    page = hooks.command_line()
    section = page.partition("### --algo sac")[2].partition("### --algo")[0]
    assert "| `--optimiser` | `rmsprop`, `adam`, `adamw`, default `adam` |" in section
    assert "| `--learning_rate` | float, default `0.0003` |" in section  # rmsprop's is 0.0006
    assert "| `--learn_temperature` | switch, default on |" in section
    assert "`--replay_size 1000000`" in section
    assert all(f"\n### --algo {algo}\n" in page for algo in ALGOS)


def test_the_page_of_presets_has_their_flags(hooks: ModuleType) -> None:
    page = hooks.presets()
    assert re.findall(r"^### (.*)$", page, re.MULTILINE) == list(PRESETS)
    families = {preset.family for preset in PRESETS.values()}
    assert sorted(re.findall(r"^## (.*)$", page, re.MULTILINE)) == sorted(families)
    assert "`--model_kwargs '{\"hidden\": 64}'`, `--batch_size 128`" in page


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("examples/cartpole.py", f"{ADDRESS}/blob/main/examples/cartpole.py"),
        ("examples/cluster", f"{ADDRESS}/tree/main/examples/cluster"),
        ("CONTRIBUTING.md", "../contributing/index.md"),
        ("docs/results/README.md", "../results/README.md"),
        ("docs/results/performance", f"{ADDRESS}/tree/main/docs/results/performance"),
        ("torchbeast/core/storages", "../reference/api/torchbeast.core.storages.md"),
        ("torchbeast/zoo/presets.ini", "../reference/presets.md"),
        ("torchbeast/cli", f"{ADDRESS}/tree/main/torchbeast/cli"),
        ("examples/no_such_file.py", None),
    ],
)
def test_a_link_leads_to_a_page_of_the_site_or_to_the_repository(
    hooks: ModuleType, path: str, link: str | None
) -> None:
    assert hooks.link_to(path, "how-to/ppo.md", ADDRESS) == link


def test_only_flags_in_code_are_kept_whole(hooks: ModuleType) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="how-to/ppo.md"))
    html = '<a href="#--algo-ppo"><code>program --num-actors 4</code></a> a--b <code>a-b</code>'
    whole = html.replace("--num-actors", '<span class="flag">--num-actors</span>')
    assert hooks.on_page_content(html, page, None, None) == whole


def test_a_function_with_the_name_of_a_submodule_is_documented_as_the_function(
    hooks: ModuleType,
) -> None:
    for name, path in {
        "export": "torchbeast.evaluation.exporting.export",
        "load_agent": "torchbeast.load_agent",
    }.items():
        importlib.import_module("torchbeast.export")
        found = hooks.public_name(torchbeast, name)
        assert isinstance(found, FunctionType)
        assert hooks.path_of("torchbeast", name, found) == path


def test_a_public_name_or_method_without_a_docstring_is_a_warning(
    hooks: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    class Documented:
        """Is."""

        def method(self) -> None: ...

        def _private(self) -> None: ...

    hooks.check_documented("package.Documented", Documented)
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "package.Documented.method"
    ]


def test_the_loop_on_the_page_about_the_architecture_is_the_code() -> None:
    page = (ROOT / "docs" / "contributing" / "architecture.md").read_text("utf-8")
    (shown,) = re.findall(r"^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    code = (ROOT / "torchbeast" / "run" / "training.py").read_text("utf-8")
    assert textwrap.indent(shown, 8 * " ") in code
