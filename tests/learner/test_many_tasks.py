# SPDX-License-Identifier: Apache-2.0
"""One agent is trained on a list of tasks and played in each of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tasks_by_hand
from small_schemes import off_policy_of, scheme_of

from torchbeast.core.algos import IMPALA
from torchbeast.core.storages import OnPolicyVTraceBuffer
from torchbeast.envs import EnvSpec, make
from torchbeast.learner import Learner

TWO = EnvSpec.of_tasks(["Catch", tasks_by_hand.late_catch])
ENVS = {"env_fn": make, "env_kwargs": {"env": TWO}, "vec_env_size": 2}


@pytest.mark.parametrize("has_replay", [False, True])
def test_a_run_logs_and_plays_each_task(tmp_path: Path, has_replay: bool) -> None:
    storage = OnPolicyVTraceBuffer.create_factory(size=10)
    algo = IMPALA.create_factory(popart=True)
    scheme = off_policy_of(ENVS) if has_replay else scheme_of(ENVS, algo, storage)
    with Learner(scheme, 10**6, log_dir=tmp_path) as learner:
        while learner.get_metrics().get("episodes", 0) < 20:
            row = learner.step()
        names = [name for name in row if name.startswith("mean_return_")]
        assert names == ["mean_return_Catch", "mean_return_tasks_by_hand:late_catch"]
        assert -1 <= row["mean_return_Catch"] <= 1
        assert row["mean_return"] == pytest.approx(sum(row[name] for name in names) / 2)
        played = learner.evaluate(2, seed=1)
        assert sorted(played.tasks) == [0, 0, 1, 1]
        assert played.mean == pytest.approx(sum(played.task_means().values()) / 2)
