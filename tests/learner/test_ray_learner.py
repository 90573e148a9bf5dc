# SPDX-License-Identifier: Apache-2.0
"""The workers of a scheme may be Ray's actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from small_schemes import impala_of

from torchbeast import Learner

ray = pytest.importorskip("ray")


@pytest.mark.parametrize("is_initialised", [False, True])
def test_ray_is_started_for_the_run_unless_the_caller_has_done_so(
    is_initialised: bool, tmp_path: Path
) -> None:
    def make_env() -> Any:  # as in a notebook: nothing that a worker could import
        return gymnasium.make("CartPole-v1")

    if is_initialised:
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        scheme = impala_of(
            envs={"env_fn": make_env, "vec_env_size": 2},
            col_remote_workers=2,
            col_communication="asynchronous",
            col_backend="ray",
            col_worker_resources={"num_cpus": 0.5},
        )
        with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
            before = {key: value.clone() for key, value in learner.actor.state_dict().items()}
            for _ in range(3):
                learner.step()
            assert ray.is_initialized()
            if is_initialised:  # Ray's own count of what it reserved
                assert ray.available_resources()["CPU"] == 1.0
            after = learner.actor.state_dict()
        assert all(not torch.equal(before[key], after[key]) for key in before)
        assert ray.is_initialized() == is_initialised, "what the caller has started goes on"
    finally:
        ray.shutdown()
