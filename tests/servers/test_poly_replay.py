# SPDX-License-Identifier: Apache-2.0
"""The online columns of batches with a replay keep the contract of sources, from PolyBeast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compliance.source import Running, Setup, SourceCompliance, take
from mixed_running import SPARE, mixing
from test_poly_source import described, playing, served

from torchbeast import envs


class TestMixedPolySource(SourceCompliance):
    @contextmanager
    def running(self, setup: Setup) -> Iterator[Running]:
        num_envs = setup.num_envs // setup.num_groups
        with served(
            lambda: envs.make(setup.env_id, num_envs), described(setup, num_envs)
        ) as address:
            online = playing(address, setup, spare_columns=SPARE)
            with mixing(online, setup) as running:
                yield running

    def test_there_are_replayed_columns(self) -> None:
        with self.running(Setup(env_id="source_envs:Counting")) as running:
            take(running, 12)
        assert running.source.replayed > 4 * SPARE
