# SPDX-License-Identifier: Apache-2.0
"""The online columns of batches with a replay keep the contract of sources, from MonoBeast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from compliance.source import Running, Setup, SourceCompliance, take
from fleet_running import running_mono
from mixed_running import IN_FLIGHT, SPARE, mixing

pytestmark = pytest.mark.long  # beside shorter tests of the same parts


class TestMixedMonoSource(SourceCompliance):
    @contextmanager
    def running(self, setup: Setup) -> Iterator[Running]:
        online = running_mono(setup, batches_at_once=IN_FLIGHT, spare_columns=SPARE)
        with mixing(online, setup) as running:
            yield running

    def test_there_are_replayed_columns(self) -> None:
        with self.running(Setup(env_id="source_envs:Counting")) as running:
            take(running, 12)
        assert running.source.replayed > 4 * SPARE
