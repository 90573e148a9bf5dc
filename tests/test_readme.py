# SPDX-License-Identifier: Apache-2.0
"""The Python code in README.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


def test_the_example_trains_and_evaluates_as_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    ran: dict[str, object] = {}
    exec(code.replace("100_000", "2_048"), ran)
    assert (tmp_path / "logs" / "cartpole" / "model.tar").exists()
    returns = capsys.readouterr().out.splitlines()[-1]
    assert len(returns.strip("[]").split(",")) == 10
    assert all(1 <= float(each) <= 500 for each in returns.strip("[]").split(","))
