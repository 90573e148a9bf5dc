# SPDX-License-Identifier: Apache-2.0
"""Agents without processes, for tests that ask for them."""

from __future__ import annotations

import pytest
from fake_child import ENDED, SILENT, FakeChild

from torchbeast.sweep import runner


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeChild.made, FakeChild.ends_when_asked = [], False
    ENDED.clear()
    SILENT.clear()
    monkeypatch.setattr(runner, "ChildProcess", FakeChild)
    monkeypatch.setattr(runner, "_EVERY_S", 0.0)
