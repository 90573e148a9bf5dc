# SPDX-License-Identifier: Apache-2.0
"""The online columns of batches with a replay keep the contract of sources, from PolyBeast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compliance.source import Running, Setup, take
from mixed_running import SPARE, mixing
from test_poly_source import described, playing, served
from transitions_running import check_contract

from torchbeast import envs


@contextmanager
def running(setup: Setup) -> Iterator[Running]:
    num_envs = setup.num_envs // setup.num_groups
    with served(lambda: envs.make(setup.env_id, num_envs), described(setup, num_envs)) as address:
        online = playing(address, setup, spare_columns=SPARE)
        with mixing(online, setup) as found:
            yield found


def test_new_columns_keep_the_contract_of_sources() -> None:
    check_contract(running)


def test_there_are_replayed_columns() -> None:
    with running(Setup(env_id="source_envs:Counting")) as found:
        take(found, 12)
    assert found.source.replayed > 4 * SPARE
