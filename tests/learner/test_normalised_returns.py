# SPDX-License-Identifier: Apache-2.0
"""Normalised returns in whole runs: raw in logs, saved, frozen in evaluation, joined by workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from later import later
from small_schemes import scheme_of
from source_envs import Telling

from torchbeast import Learner
from torchbeast.core.algos import PPO
from torchbeast.reporting.log_files import read_logs

ENVS = {"env_fn": Telling, "vec_env_size": 2, "info_keywords": ["squared", "steps"]}


def scheme(**axes: Any) -> Any:
    algo = PPO.create_factory(num_epochs=1, num_mini_batch=2, normalise_returns=True)
    return scheme_of(envs=ENVS, algo=algo, **axes)


def statistics(path: Path) -> dict[str, torch.Tensor]:
    saved = torch.load(path, weights_only=True)["algorithm_state_dict"]["models"]["returns"]
    assert set(saved) == {"mean", "variance", "count"}
    return dict(saved)


def test_they_are_saved_and_evaluation_leaves_them_alone(tmp_path: Path) -> None:
    with Learner(scheme(), 400, tmp_path / "run", seed=1) as learner:
        learner.train(200)
        before = statistics(learner.save_model(tmp_path / "before.tar"))
        assert before["count"] == learner.steps == 200
        learner.evaluate(3)
        after = statistics(learner.save_model(tmp_path / "after.tar"))
        assert all(torch.equal(before[name], after[name]) for name in before)
        learner.restore(tmp_path / "before.tar")
        learner.train()
    assert statistics(tmp_path / "run" / "model.tar")["count"] == 400
    for row in read_logs(tmp_path / "run"):  # an episode of n steps returns 1 + ... + n
        raw = (row["info_squared"] + row["info_steps"]) / 2
        assert row["mean_episode_return"] == pytest.approx(raw)


@pytest.mark.parametrize("update", ["centralised", later("decentralised")])
def test_gradient_workers_join_them(update: str, tmp_path: Path) -> None:
    axes = {"grad_remote_workers": 2, "update_execution": update}
    with Learner(scheme(**axes), 10**6, tmp_path / "run", seed=1) as learner:
        for _ in range(3):
            learner.step()
        saved = statistics(learner.save_model(tmp_path / "saved.tar"))
        assert saved["count"] == learner.steps == 3 * 2 * 20
    # Returns of 1 + g, (2 + g) + ... of episodes of one to four steps, at most 4 + 3g + 2g^2 + g^3.
    assert 0.5 < saved["variance"].item() < 25
