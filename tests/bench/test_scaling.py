# SPDX-License-Identifier: Apache-2.0
"""The formula of scale: its fit, its limits, and the sentence that a user reads."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from bench.hosts import load_of, sentence
from bench.limits import ENVIRONMENT, Figure
from bench.scaling import Load, Network, Prediction, cost_us, fitted, predict

from torchbeast.servers.env_servers import ServerPlan

LOAD = Load(streams=64, envs_per_stream=16, frame_bytes=7056, step_s=0.1)
NETWORK = Network(inference_us=40, learning_us=100)


def test_the_fit_finds_the_coefficients_that_made_the_costs() -> None:
    true = (60.0, 2.0, 0.5, 30.0, 1.5)  # A, B, C, and what TLS adds to A and C
    rows = []
    for envs, kilobytes, tls in itertools.product((1, 16, 64), (0.1, 7, 28), (0, 1)):
        per_message, per_kb = true[0] + true[3] * tls, true[2] + true[4] * tls
        cost = per_message / envs + true[1] + per_kb * kilobytes
        row = {"envs_per_stream": envs, "frame_bytes": int(1000 * kilobytes), "tls": tls}
        rows.append(row | {"streams": 1, "step_ms": 1, "learner_us": cost})
    read = [{name: str(value) for name, value in row.items()} for row in rows]
    assert fitted(read, "learner_us") == pytest.approx(true)


def test_a_step_costs_more_alone_in_its_message_with_tls_and_with_more_bytes() -> None:
    """In the formula as it was measured."""
    alone, plain = (
        dataclasses.replace(LOAD, **change) for change in ({"envs_per_stream": 1}, {"tls": False})
    )
    small = dataclasses.replace(LOAD, frame_bytes=64)
    assert cost_us(alone, "learner_us") > cost_us(LOAD, "learner_us") > cost_us(plain, "learner_us")
    assert cost_us(small, "learner_us") < cost_us(LOAD, "learner_us")


def test_the_smallest_limit_is_the_prediction() -> None:
    few = predict(LOAD, NETWORK, cores=16)
    assert few.limit == "environments" and few.steps_per_second == 10_240
    fast = dataclasses.replace(LOAD, step_s=0.01)
    many = predict(fast, NETWORK, cores=4)
    assert many.limit == "cores"
    assert many.steps_per_second == pytest.approx(0.85 * 4e6 / many.learner_us)
    shared = predict(fast, NETWORK, cores=4, beside_us=many.learner_us)
    assert shared.steps_per_second == pytest.approx(many.steps_per_second / 2)
    slow = dataclasses.replace(NETWORK, inference_rate=500.0)
    assert predict(fast, slow, cores=4).limit == "inference"
    assert predict(fast, NETWORK, cores=4, link_bytes=7_056_00).limit == "network link"


def test_more_learners_raise_every_limit_but_the_environments() -> None:
    one, two = (predict(LOAD, NETWORK, 2, learners) for learners in (1, 2))
    assert two.limits["environments"] == one.limits["environments"]
    assert two.limits["cores"] == pytest.approx(2 * one.limits["cores"])


def test_hosts_offer_what_this_machine_steps_alone() -> None:
    figures = {ENVIRONMENT: Figure(steps_per_second=800, cpu_us=1000)}
    load = load_of(figures, [ServerPlan(1, 8), ServerPlan(1, 8)], hosts=10, frame_bytes=7056)
    assert load.streams == 20 and load.envs_per_stream == 8
    offered = predict(load, NETWORK, cores=64).limits["environments"]
    assert offered == pytest.approx(10 * 800)


def test_the_sentence_says_how_many_hosts_a_learner_takes_in_and_how_many_learners_all_need() -> (
    None
):
    found = Prediction({"environments": 1000.0, "cores": 400.0}, learner_us=50)
    said = sentence(found, hosts=10)
    assert "10 hosts make 400 steps/s" in said and "4 hosts would do" in said
    assert "need at least 3 such learners (torchrun)" in said
    enough = sentence(Prediction({"environments": 100.0, "cores": 400.0}, learner_us=50), hosts=10)
    assert "one learner takes in 40" in enough
