# SPDX-License-Identifier: Apache-2.0
"""The rollouts behind transitions keep the contract of sources, from MonoBeast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from compliance.source import Running, Setup, SourceCompliance
from fleet_running import running_mono
from transitions_running import counting

pytestmark = pytest.mark.long  # beside shorter tests of the same parts


class TestTransitionsOfMonoSource(SourceCompliance):
    @contextmanager
    def running(self, setup: Setup) -> Iterator[Running]:
        with counting(running_mono(setup), setup) as running:
            yield running
