# SPDX-License-Identifier: Apache-2.0
"""Each family of environments trains for some hundred steps in both programs: whole programs, so
this takes minutes. `make test-families` installs what it needs.
"""

from __future__ import annotations

import math

import pytest
from programs import Workshop
from user_families import FAMILIES, Family, name_of

from torchbeast.reporting.log_files import read_logs

STEPS = 480
SETTINGS = {
    "num_envs": "4",
    "batch_size": "4",
    "unroll_length": "20",
    "total_steps": f"{STEPS}",
    "xpid": "a",
    "seed": "1",
}
PATIENCE = 220.0


@pytest.mark.families
@pytest.mark.parametrize("program", ["monobeast", "polybeast"])
@pytest.mark.parametrize("family", FAMILIES, ids=name_of)
def test_a_family_trains_for_some_hundred_steps(
    workshop: Workshop, family: Family, program: str
) -> None:
    args = [f"--{name}={value}" for name, value in SETTINGS.items()] + ["--env", family.env_id()]
    keys = ["--observation_keys", *family.observation_keys] if family.observation_keys else []
    code, said = workshop.run(program, *args, *keys, timeout=PATIENCE)
    assert code == 0, said
    assert f"Trained for {STEPS} steps" in said, said
    losses = [row["total_loss"] for row in read_logs(workshop.run_folder("a"))]
    assert len(losses) == STEPS // 80 and all(math.isfinite(loss) for loss in losses)
    workshop.assert_nothing_is_left()
