# SPDX-License-Identifier: Apache-2.0
"""The rollouts behind transitions keep the contract of sources, from PolyBeast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compliance.source import Running, Setup
from test_poly_source import described, playing, served
from transitions_running import check_contract, counting

from torchbeast import envs


@contextmanager
def running(setup: Setup) -> Iterator[Running]:
    num_envs = setup.num_envs // setup.num_groups
    with (
        served(lambda: envs.make(setup.env_id, num_envs), described(setup, num_envs)) as address,
        playing(address, setup) as found,
    ):
        yield found


def test_its_rollouts_go_through_a_replay_unchanged() -> None:
    check_contract(lambda setup: counting(running(setup), setup))
