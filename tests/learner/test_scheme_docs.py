# SPDX-License-Identifier: Apache-2.0
"""docs/explanation/schemes.md and docs/reference/combinations.md say what the code does."""

from __future__ import annotations

import re

from scheme_docs import COMBINATIONS, PAGE, pictures, with_table

from torchbeast.core.algos.config import OTHER_NAMES
from torchbeast.schemes.presets import PRESETS

WRITE = "run python tests/learner/scheme_docs.py and read what changes"


def test_the_table_of_combinations_is_what_the_code_says() -> None:
    page = COMBINATIONS.read_text()
    assert page.count("| runs |") >= 3
    assert with_table(page) == page, WRITE


def test_the_pictures_are_those_of_the_named_architectures() -> None:
    for path, image in pictures():
        assert path.read_text() == image, WRITE
        assert f"(schemes/{path.name})" in PAGE.read_text()


def test_the_page_names_every_architecture_and_every_other_name() -> None:
    page = PAGE.read_text()
    for name in PRESETS:
        assert f"`{name}`" in page, name
    rows = re.findall(r"^\| `(\w+)` \| (`\w+`(?:, `\w+`)*) \|$", page, re.MULTILINE)
    other_names = [(other, name) for name, others in rows for other in re.findall(r"\w+", others)]
    assert sorted(other_names) == sorted(OTHER_NAMES.items())
