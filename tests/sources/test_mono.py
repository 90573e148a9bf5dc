# SPDX-License-Identifier: Apache-2.0
"""MonoBeast's source keeps the contract of sources, and more: its processes may die, and a fixed
lag makes every batch the same in every run."""

from __future__ import annotations

from contextlib import AbstractContextManager

from compliance.source import Running, Setup, SourceCompliance
from mono_running import running_mono


class TestMonoSource(SourceCompliance):
    def running(self, setup: Setup) -> AbstractContextManager[Running]:
        return running_mono(setup)
