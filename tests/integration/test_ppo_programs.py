# SPDX-License-Identifier: Apache-2.0
"""PPO learns through every program, and MonoBeast resumes the run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from programs import Workshop, each_program

pytestmark = pytest.mark.long  # beside shorter tests of the same parts

RANDOM_RETURN = 22  # mean of a policy that draws its actions evenly
LONG = 300.0
PROGRAMS = {"monobeast": ["--fixed_lag", "0"], "polybeast": [], "raybeast": []}


@each_program("monobeast", "polybeast", "raybeast")
def test_cartpole_is_learnt(
    workshop: Workshop, program: str, runtime_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program == "raybeast":
        pytest.importorskip("ray")
        monkeypatch.setenv("TMPDIR", str(runtime_folder))
    shared = ["--xpid", "ppo", "--torch_threads", "1"]
    train = ["--preset", "cartpole-ppo", "--total_steps", "24000", "--seed", "1"]
    code, said = workshop.run(program, *shared, *train, *PROGRAMS[program], timeout=LONG)
    assert code == 0, said
    assert workshop.meta("ppo")["args"]["algo"] == "ppo"
    code, said = workshop.run("monobeast", "--mode", "test", *shared, "--num_episodes", "20")
    match = re.search(r"Mean (-?[\d.]+), median", said)
    assert code == 0 and match, said
    assert float(match[1]) > 4 * RANDOM_RETURN
    more = ["--total_steps", "26000"]
    code, said = workshop.run("monobeast", *shared, *more, timeout=LONG)
    assert code == 0 and "Resuming" in said, said
