# SPDX-License-Identifier: Apache-2.0
"""Agents without processes, for tests that ask for them."""

from __future__ import annotations

import pytest
from fake_child import ENDED, SILENT, FakeChild

from torchbeast.sweep import local


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeChild.made, FakeChild.are_asked_together = [], True
    ENDED.clear()
    SILENT.clear()
    monkeypatch.setattr(local, "ChildProcess", FakeChild)
    monkeypatch.setattr(local, "_EVERY_S", 0.0)
