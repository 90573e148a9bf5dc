# SPDX-License-Identifier: Apache-2.0
"""Off-policy algorithms run in every program, and MonoBeast evaluates what they learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
from later import later
from programs import Workshop

pytestmark = pytest.mark.long  # beside shorter tests of the same parts

LONG = 300.0
SMALL = ["--num_envs", "2", "--learn_start", "100", "--batch_size", "16", "--replay_size", "2000"]


@pytest.mark.parametrize(
    ("program", "algo", "env"),
    [
        ("monobeast", "dqn", "CartPole-v1"),
        ("polybeast", "sac", "Pendulum-v1"),
        later("polybeast", "dqn", "CartPole-v1"),
        later("monobeast", "sac", "Pendulum-v1"),
        later("raybeast", "dqn", "CartPole-v1"),
        later("raybeast", "sac", "Pendulum-v1"),
    ],
)
def test_every_program_runs_them(
    workshop: Workshop,
    program: str,
    algo: str,
    env: str,
    runtime_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if program == "raybeast":
        pytest.importorskip("ray")
        monkeypatch.setenv("TMPDIR", str(runtime_folder))
    train = ["--algo", algo, "--env", env, "--xpid", algo, "--total_steps", "400", *SMALL]
    code, said = workshop.run(program, *train, "--replay_ratio", "16", timeout=LONG)
    assert code == 0, said
    code, said = workshop.run("monobeast", "--mode", "test", "--xpid", algo, "--num_episodes", "2")
    assert code == 0 and "Mean" in said, said
