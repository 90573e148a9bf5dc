# SPDX-License-Identifier: Apache-2.0
"""The workers of a scheme may be Ray's actors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch
from small_schemes import impala_of, off_policy_of

from torchbeast import Learner, UsageError
from torchbeast.reporting.log_files import read_logs

ray = pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def without_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets later tests of this process start a Ray without a token: it is asked for or not once."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")


def local_function() -> Any:
    """Returns a function that makes an environment and cannot be imported, as in a notebook."""

    class Telling(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            *others, info = self.env.step(action)
            return *others, {**info, "seven": 7.0}

    return lambda: Telling(gymnasium.make("CartPole-v1"))


def ray_scheme(make: Any = impala_of) -> Any:
    return make(
        envs={"env_fn": local_function(), "vec_env_size": 2, "info_keywords": ["seven"]},
        col_remote_workers=2,
        col_communication="asynchronous",
        col_backend="ray",
        col_worker_resources={"num_cpus": 0.5},
    )


@pytest.mark.parametrize("make", [impala_of, off_policy_of])
def test_ray_is_started_for_the_run_and_reserves_what_is_asked_for(
    make: Any, tmp_path: Path
) -> None:
    with Learner(ray_scheme(make), 10**6, tmp_path / "run", seed=1) as learner:
        before = {key: value.clone() for key, value in learner.actor.state_dict().items()}
        for _ in range(3):
            learner.step()
        has = ray.cluster_resources()["CPU"]
        assert ray.available_resources()["CPU"] == has - 2 * 0.5
        after = learner.actor.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in before)
    rows = list(read_logs(tmp_path / "run"))
    ended = [row for row in rows if "mean_episode_return" in row]
    assert all(row.get("info_seven") == (7.0 if row in ended else None) for row in rows)
    assert not ray.is_initialized()


def test_a_ray_that_the_caller_has_initialised_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match=r"call ray\.shutdown\(\) before"):
        Learner(ray_scheme(), 10**6, tmp_path / "run")
