# SPDX-License-Identifier: Apache-2.0
"""The algorithm in docs/how-to/extending.md is one, and its setting a flag with a check."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.registry import find
from torchbeast.errors import UsageError

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "extending.md"


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The documented algorithm, as a user would name it."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "class MyAlgo" in block]
    (tmp_path / "documented_algorithm.py").write_text(found)
    monkeypatch.syspath_prepend(tmp_path)
    return "documented_algorithm:MyAlgo"


def test_the_documented_algorithm_has_its_setting_and_those_of_impala(name: str) -> None:
    flags = parse(MonoBeastFlags, "monobeast", ["--algo", name, "--step_cost", "0.5"])
    config: Any = flags.algorithm
    assert config.step_cost == 0.5
    assert dataclasses.replace(config, step_cost=0.01) == find(name).Config()
    assert issubclass(find(name), IMPALA)


@pytest.mark.parametrize("flag", ["--step_cost", "--entropy_cost"])
def test_its_own_check_and_those_of_impala_are_made(flag: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} must be at least 0, got -1"):
        parse(MonoBeastFlags, "monobeast", ["--algo", name, flag, "-1"])
