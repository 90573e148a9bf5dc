# SPDX-License-Identifier: Apache-2.0
"""Environments that users bring can be acted in and learnt from.

This runs in one process, for families whose packages are installed; `make test-families` installs
all of them, and runs both programs on each (integration/test_family_runs.py).
"""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path

import pytest
import torch
from assorted import check_rollout
from later import later
from learners import impala
from test_rollout_buffers import Player, columns_of
from user_families import FAMILIES, Family, name_of

from torchbeast import envs

E = 2


@pytest.mark.parametrize("use_lstm", [False, later(True)], ids=["", "lstm"])
@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_environments_of_an_installed_family_can_be_acted_in_and_learnt_from(
    family: Family, use_lstm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where MuJoCo leaves a file
    options = envs.EnvOptions(observation_keys=family.observation_keys)
    torch.manual_seed(0)
    with closing(envs.make(envs.EnvSpec(family.env_id(), options=options), E)) as env:
        player = Player(env, model="auto", use_lstm=use_lstm, num_slots=1)
        player.play(0)
    rollout = columns_of(player, E, [(0, 0, E)])
    check_rollout(rollout)
    step = impala(player.actor, bytes_at_once=1, reward_clipping="none")
    metrics = step.update(rollout).metrics
    assert math.isfinite(metrics["total_loss"]) and metrics["grad_norm"] > 0
