# SPDX-License-Identifier: Apache-2.0
"""Off-policy runs in environments that raise when a masked action is taken."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from later import later
from masked import InInfo, Masked
from small_schemes import off_policy_of, replay_of

from torchbeast import Learner
from torchbeast.core.algos import DQN, SAC
from torchbeast.envs.masks import masked_from_info

DQN_SOON = DQN.create_factory(exploration_steps=100, gamma=0.9)


@pytest.mark.parametrize(
    ("algo", "env_fn"),
    [
        (DQN_SOON, masked_from_info(InInfo)),
        (SAC.create_factory(), Masked),
        later(DQN_SOON, Masked),
        later(SAC.create_factory(), masked_from_info(InInfo)),
    ],
)
def test_no_masked_action_is_taken_in_training_or_evaluation(
    algo: Any, env_fn: Any, tmp_path: Path
) -> None:
    envs, storage = {"env_fn": env_fn, "vec_env_size": 3}, replay_of(replay_ratio=8)
    scheme = off_policy_of(envs=envs, algo=algo, storage=storage)
    with Learner(scheme, 300, tmp_path / "run", seed=1) as learner:
        learner.train(250)
        for sampled in (True, False):
            assert learner.evaluate(6, sampled=sampled).lengths == [5] * 6
        assert math.isfinite(learner.train()["total_loss"])
