# SPDX-License-Identifier: Apache-2.0
"""Whole runs of MonoBeast where no compiled module can be imported."""

from __future__ import annotations

import pytest
from programs import Program, Workshop

pytestmark = pytest.mark.long

SMALL = [
    "--num_envs",
    "4",
    "--batch_size",
    "4",
    "--unroll_length",
    "10",
    "--torch_threads",
    "1",
    "--xpid",
    "a",
]
ONE = ["--num_workers", "1"]  # each takes as long to start as the learner


def start(workshop: Workshop, total_steps: int, *more: str, env: str = "Catch") -> Program:
    steps = str(total_steps)
    return workshop.start("monobeast", "--env", env, "--total_steps", steps, *SMALL, *ONE, *more)


def learnt(workshop: Workshop, total_steps: int, *more: str, env: str = "Catch") -> str:
    """Returns the output of a run that must succeed."""
    run = start(workshop, total_steps, *more, env=env)
    assert run.end() == 0, run.said
    return run.said


def test_compiled_modules_cannot_be_imported_in_these_tests(workshop: Workshop) -> None:
    """Without this the other tests would not prove that MonoBeast works without them."""
    (workshop.folder / "curious.py").write_text(
        "def make_env():\n    import libtorchbeast\n"  # no environment: the import raises
    )
    run = start(workshop, 400, env="curious:make_env")
    assert run.end() != 0
    assert "libtorchbeast is not installed in this test" in run.said


def test_a_users_own_environment_is_trained_on(workshop: Workshop) -> None:
    assert "Mean return 10.00" in learnt(workshop, 2000, env="environments:Legacy")
    workshop.assert_nothing_is_left()


def test_each_program_resumes_and_evaluates_a_run_of_the_other(workshop: Workshop) -> None:
    args = ["--env", "Catch", *SMALL, "--use_lstm"]
    code, said = workshop.run("polybeast", *args, "--num_servers", "1", "--total_steps", "400")
    assert code == 0, said
    assert f"Resuming {workshop.run_folder('a')}" in learnt(workshop, 800, "--use_lstm")
    assert workshop.saved_step() == 800
    code, said = workshop.run("polybeast", "--mode", "test", "--xpid", "a")
    assert code == 0 and "over 10 episodes" in said, said
