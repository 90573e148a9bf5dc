# SPDX-License-Identifier: Apache-2.0
"""Environments are spread evenly, in groups of the number of streams of a server."""

from __future__ import annotations

import pytest

from torchbeast.servers.config import FleetConfig
from torchbeast.servers.env_servers import ServerPlan, plans_for_local_servers, spread
from torchbeast.servers.source import rollout_columns

CASES = {
    (4, 2): [ServerPlan(2, 1), ServerPlan(2, 1)],
    (4, 4): [ServerPlan(1, 1)] * 4,
    (10, 2): [ServerPlan(2, 3), ServerPlan(2, 2)],
    (32, 2): [ServerPlan(2, 8), ServerPlan(2, 8)],
    (5, 2): [ServerPlan(2, 1), ServerPlan(1, 3)],
    (1, 1): [ServerPlan(1, 1)],
}


@pytest.mark.parametrize("case", CASES)
def test_plans_spread_environments_evenly_over_servers_and_streams(case: tuple[int, int]) -> None:
    assert spread(*case) == CASES[case]


def test_with_one_stream_it_has_all_environments_of_its_server() -> None:
    assert spread(33, 2, num_streams=1) == [ServerPlan(1, 17), ServerPlan(1, 16)]


@pytest.mark.parametrize(
    ("gpu", "disabled", "expected"),
    [
        (True, False, ServerPlan(2, 8)),
        (True, True, ServerPlan(1, 16)),
        (False, False, ServerPlan(1, 16)),
    ],
)
def test_servers_of_a_learner_on_the_cpu_have_one_stream(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, disabled: bool, expected: ServerPlan
) -> None:
    monkeypatch.setattr("torchbeast.servers.env_servers.seems_to_have_a_gpu", lambda: gpu)
    fleet = FleetConfig(num_envs=32, num_servers=2)
    assert plans_for_local_servers(fleet, disabled) == [expected] * 2


@pytest.mark.parametrize("num_streams", [1, 2])
def test_all_environments_are_served_and_no_server_is_idle(num_streams: int) -> None:
    cases = [(actors, servers) for actors in range(1, 40) for servers in range(1, actors + 1)]
    assert cases
    for actors, servers in cases:
        plans = spread(actors, servers, num_streams)
        assert len(plans) == servers
        assert sum(plan.num_envs for plan in plans) == actors
        counts = [plan.num_envs for plan in plans]
        assert min(counts) >= 1 and max(counts) - min(counts) <= 3


@pytest.mark.parametrize(
    ("batch_size", "streams", "columns"),
    [(8, [16], 8), (8, [3, 2], 1), (8, [6, 6], 2), (6, [4], 2)],
)
def test_the_columns_of_an_item_divide_the_batch_and_every_stream(
    batch_size: int, streams: list[int], columns: int
) -> None:
    assert rollout_columns(batch_size, streams) == columns
