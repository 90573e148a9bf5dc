# SPDX-License-Identifier: Apache-2.0
"""The bottleneck is found from given figures. Costs are in microseconds per step."""

from __future__ import annotations

import math

import pytest
from bench.limits import END_TO_END, Figure, cpu_sum, figure, judge, predict
from bench.sample import Sample

CORES = 2


def on_all_cores(cpu_us: float) -> Figure:
    """Returns the figure of a stage that uses all cores when it is alone."""
    return Figure(CORES * 1e6 / cpu_us, cpu_us)


def stages(environment: float, inference: float, learner: float) -> dict[str, Figure]:
    return {
        "environment": on_all_cores(environment),
        "transport": on_all_cores(10),
        "inference": on_all_cores(inference),
        "learner": on_all_cores(learner),
    }


def test_the_sum_of_the_costs_over_the_cores_is_the_prediction() -> None:
    found = stages(environment=300, inference=90, learner=600)
    assert cpu_sum(found) == 1000
    assert predict(found, CORES) == 2000


def test_the_transport_of_another_setting_costs_nothing_in_the_prediction() -> None:
    found = stages(300, 90, 600) | {"transport, 1 env per stream": on_all_cores(80)}
    assert cpu_sum(found) == 1000


def test_a_rate_near_the_prediction_is_limited_by_the_largest_cost() -> None:
    for costs, expected in (((300, 90, 600), "learner"), ((500, 90, 400), "environment")):
        found = stages(*costs) | {END_TO_END: Figure(1900, 1050)}
        verdict = judge(found, CORES)
        assert verdict.limit == expected
        assert f"Bottleneck: {expected}." in verdict.sentence
    assert "50 %" in verdict.sentence


def test_a_stage_that_cannot_use_all_cores_limits_an_equal_end_to_end_rate() -> None:
    """An example is a learner on a GPU, which costs the cores little."""
    found = stages(300, 90, 1) | {"learner": Figure(1500, 100), END_TO_END: Figure(1450, 600)}
    assert predict(found, CORES) == 1500
    assert judge(found, CORES).limit == "learner"


def test_a_stage_that_is_slower_alone_than_end_to_end_does_not_limit() -> None:
    """An example is inference on a GPU, which gets larger batches from several streams."""
    found = stages(300, 90, 600) | {"inference": Figure(500, 90), END_TO_END: Figure(1900, 1050)}
    assert judge(found, CORES).limit == "learner"


def test_a_rate_far_below_the_prediction_with_idle_cores_is_waiting() -> None:
    found = stages(300, 90, 600) | {END_TO_END: Figure(1000, 1000)}
    verdict = judge(found, CORES)
    assert verdict.limit == "waiting"
    assert "50 %" in verdict.sentence and "1.0 of 2 cores busy" in verdict.sentence


def test_a_rate_far_below_the_prediction_on_busy_cores_is_sharing() -> None:
    found = stages(300, 90, 600) | {END_TO_END: Figure(1000, 2000)}
    verdict = judge(found, CORES)
    assert verdict.limit == "sharing"
    assert "2,000 us" in verdict.sentence and "1,000 us in the stages alone" in verdict.sentence


def test_without_transport_and_end_to_end_the_largest_known_cost_limits() -> None:
    found = stages(300, 90, 600)
    del found["transport"]
    assert math.isnan(predict(found, CORES))
    verdict = judge(found, CORES)
    assert verdict.limit == "learner" and "61 %" in verdict.sentence


def test_without_cpu_times_the_slowest_stage_limits() -> None:
    found = stages(300, 90, 600) | {"transport": Figure(200.0, math.nan)}
    assert math.isnan(predict(found, CORES))
    assert judge(found | {END_TO_END: Figure(100, math.nan)}, CORES).limit == "transport"


def test_figures_are_medians() -> None:
    samples = [Sample(100, 1, 0.01), Sample(300, 1, 0.06), Sample(9000, 1, 9)]
    assert figure(samples) == pytest.approx(Figure(300, 200))


def test_the_replay_is_a_stage_where_there_is_one() -> None:
    found = stages(300, 90, 600)
    with_replay = found | {"replay": on_all_cores(2000)}
    assert cpu_sum(with_replay) == cpu_sum(found) + 2000
    assert judge(with_replay, CORES).limit == "replay"
    assert predict(with_replay, CORES) == pytest.approx(CORES * 1e6 / 3000)
