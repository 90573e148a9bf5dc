# SPDX-License-Identifier: Apache-2.0
"""The training loop of the programs learns from gradient workers as from any source."""

from __future__ import annotations

import math
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gradient_running import PPO_LEARNING, TIMEOUT_S, B, T, of_given, rollout, running

from torchbeast.collect.weights import PublishedWeights
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.reporting.display import Progress
from torchbeast.reporting.log_files import LogFiles, read_logs
from torchbeast.run.training import DONE, Rows, Training

UPDATES = 3


def trained(how: dict[str, Any], batches: Any, folder: Path, total_steps: int) -> Any:
    """Trains until the run ends; returns supervisor, checkpoint and the rows of the log."""
    centre, supervisor = PPO_LEARNING.step(total_steps=total_steps), Supervisor()
    make = partial(of_given, learning=PPO_LEARNING, batches=batches)
    with running(make, centre, **how) as (workers, _), closing(LogFiles(folder, 0)) as logs:
        joint: Any = workers
        training = Training(
            source=workers,
            made=Mock(
                optimiser_step=joint,
                algo=centre.algo,
                agent=Mock(model=centre.algo.actor),
                weights=PublishedWeights(centre.algo.actor),
                compute=Mock(device=torch.device("cpu")),
            ),
            supervisor=supervisor,
            rows=Rows(workers, logs, Progress(), ()),
            writer=Mock(labels={}, also=dict),
            stops_at={DONE: total_steps},
        )
        workers.start(supervisor)
        training.start(2, lambda step, row: None)
        assert supervisor.join(TIMEOUT_S) == []
        return supervisor, training.checkpoint(), read_logs(folder / "logs.csv")


@pytest.mark.parametrize(("communication", "of_one"), [("synchronous", 2), ("asynchronous", 1)])
def test_rounds_are_trained_logged_and_saved_as_batches_are(
    communication: str, of_one: int, tmp_path: Path
) -> None:
    batches = [[rollout(10 * i + k) for k in range(UPDATES)] for i in range(2)]
    steps = UPDATES * of_one * T * B
    supervisor, saved, rows = trained({"communication": communication}, batches, tmp_path, steps)
    assert (supervisor.reason, supervisor.failure) == (DONE, None)
    assert saved["scheduler_state_dict"]["version"] == UPDATES
    assert [row["step"] for row in rows] == [n * of_one * T * B for n in range(1, UPDATES + 1)]
    for row in rows:
        assert math.isfinite(row["total_loss"]) and row["max_lag"] >= 0
        assert row["collected_steps"] <= 14


def test_a_worker_whose_source_fails_is_the_failure_of_the_run(tmp_path: Path) -> None:
    only_one_has_batches = [[rollout(0)]]
    supervisor, saved, _ = trained({}, only_one_has_batches, tmp_path, 10**6)
    assert str(supervisor.failure).startswith("gradient worker 1: ")
    assert "IndexError" in str(supervisor.failure)
    assert saved["scheduler_state_dict"]["version"] == 0
