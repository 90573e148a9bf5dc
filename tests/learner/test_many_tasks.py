# SPDX-License-Identifier: Apache-2.0
"""One agent is trained on a list of tasks and played in each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tasks_by_hand
from small_schemes import off_policy_of, scheme_of

from torchbeast import export
from torchbeast.core.algos import IMPALA
from torchbeast.core.envs import VecEnv
from torchbeast.core.storages import OnPolicyVTraceBuffer
from torchbeast.envs import EnvSpec, make
from torchbeast.errors import UsageError
from torchbeast.learner import Learner
from torchbeast.schemes import Scheme

TWO = EnvSpec.of_tasks(["Catch", tasks_by_hand.late_catch])
WORKERS = {"col_remote_workers": 2, "col_communication": "asynchronous"}


def envs(each: int, *shares: float) -> dict[str, Any]:
    """Returns environments, so many of each worker."""
    return {"env_fn": make, "env_kwargs": {"env": TWO.with_shares(shares)}, "vec_env_size": each}


def with_popart(each: int = 2, *shares: float, **axes: Any) -> Scheme:
    storage = OnPolicyVTraceBuffer.create_factory(size=10)
    return scheme_of(envs(each, *shares), IMPALA.create_factory(popart=True), storage, **axes)


SCHEMES: dict[str, Callable[[], Scheme]] = {
    "here": with_popart,
    "of one task more": lambda: with_popart(4, 3, 1),
    "replay": lambda: off_policy_of(envs(2)),
    "a task per worker": lambda: with_popart(1, **WORKERS),
    "a task per server": lambda: with_popart(1, **WORKERS, inference="central"),
}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_a_run_logs_and_plays_each_task(tmp_path: Path, scheme: Callable[[], Scheme]) -> None:
    with Learner(scheme(), 10**6, log_dir=tmp_path) as learner:
        names = ["mean_return_Catch", "mean_return_tasks_by_hand:late_catch"]
        row = learner.step()
        while math.isnan(sum(row[name] for name in names)):
            assert learner.updates < 500
            row = learner.step()
        assert row[names[1]] == 0, "its episodes end before a reward"
        assert row["mean_return"] == pytest.approx(sum(row[name] for name in names) / 2)
        played = learner.evaluate(3, seed=1)
        assert sorted(played.tasks) == [0, 0, 0, 1, 1, 1]
        assert played.mean == pytest.approx(sum(played.task_means().values()) / 2)


@pytest.mark.long
def test_the_agent_of_several_tasks_is_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    with Learner(with_popart(), 10**6, log_dir=tmp_path) as learner:
        learner.step()
    assert export(tmp_path, tmp_path / "p.onnx").exists()


def test_every_task_needs_an_environment(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="num_envs 1 is less than the 2 tasks"):
        Learner(with_popart(1), 100, log_dir=tmp_path)


def test_environments_of_evaluations_have_shares_of_their_own(tmp_path: Path) -> None:
    second, _, _ = VecEnv.create_factory(**envs(1, 0, 1))
    with Learner(with_popart(test_envs_factory=second), 10**6, log_dir=tmp_path) as learner:
        assert learner.evaluate(3, seed=1).tasks == [1, 1, 1]
