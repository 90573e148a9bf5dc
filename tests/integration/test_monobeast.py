# SPDX-License-Identifier: Apache-2.0
"""MonoBeast as a whole, started where nothing that is compiled can be imported."""

from __future__ import annotations

import itertools
import signal

import psutil
import pytest
import torch
from programs import Program, Workshop

from torchbeast.runtime.log_files import read_logs

LEARNING = r"steps ([1-9][\d,]*) of "
SMALL = [
    "--num_actors",
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


def start(workshop: Workshop, total_steps: int, *more: str, env: str = "Catch") -> Program:
    steps = str(total_steps)
    return workshop.start("monobeast", "--env", env, "--total_steps", steps, *SMALL, *more)


def learnt(workshop: Workshop, total_steps: int, *more: str, env: str = "Catch") -> str:
    """What a run that must end well said."""
    run = start(workshop, total_steps, *more, env=env)
    assert run.end() == 0, run.said
    return run.said


def saved(workshop: Workshop) -> dict:
    return torch.load(workshop.run_folder("a") / "model.tar", weights_only=True)


def test_the_workshop_hides_the_compiled_part_from_it(workshop: Workshop) -> None:
    """Otherwise the other tests here would not say that MonoBeast does without."""
    (workshop.folder / "curious.py").write_text(
        "def make_env():\n    import libtorchbeast\n"  # no environment: the import raises
    )
    run = start(workshop, 400, env="curious:make_env")
    assert run.end() != 0
    assert "libtorchbeast is not installed in this test" in run.said


@pytest.mark.parametrize("env", ["Plain", "Legacy", "Truncated"])
def test_an_environment_of_the_users_own_is_trained_on(workshop: Workshop, env: str) -> None:
    assert "mean return 10.00" in learnt(workshop, 2000, env=f"environments:{env}")
    workshop.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("env", "code", "words"),
    [
        ("NoSuchEnvironment-v0", 2, ["NoSuchEnvironment"]),
        ("environments:CannotBeMade", 1, ["no ROM in the slot"]),
        ("environments:NaNReward", 1, ["actor ", "reward", "nan"]),
        ("environments:Raises", 1, ["actor ", "KeyError: 'the joystick is gone'"]),
        ("environments:NaNObservation", 1, ["loss is nan"]),
    ],
)
def test_an_environment_that_fails_ends_the_run_and_says_why(
    workshop: Workshop, env: str, code: int, words: list[str]
) -> None:
    run = start(workshop, 100_000, env=env)
    assert run.end() == code, run.said
    for word in words:
        assert word in run.said, run.said
    assert "torchbeast/runtime/learner_run.py" not in run.said, "no traceback of ours"
    workshop.assert_nothing_is_left()


def test_an_environment_that_hangs_does_not_keep_ctrl_c_from_ending_the_run(
    workshop: Workshop,
) -> None:
    run = start(workshop, 10**8, env="environments:Stuck")
    run.wait_for("steps")
    run.send(signal.SIGINT)
    assert run.end(timeout=30) == 0, run.said
    workshop.assert_nothing_is_left()


def test_a_killed_actor_is_replaced_and_the_run_goes_on(workshop: Workshop) -> None:
    run = start(workshop, 10**8, "--num_processes", "2")
    run.wait_for(LEARNING)
    first, second = workshop.actors()
    second.kill()
    run.wait_for(r"actor \d: process \d+ was killed by SIGKILL; another takes its place")
    until_replaced = (workshop.actors() for _ in itertools.count())
    alive = next(found for found in until_replaced if len(found) == 2)
    assert first in alive and second not in alive
    for _ in range(2):
        run.wait_for(LEARNING)
    run.send(signal.SIGINT)
    assert run.end() == 0, run.said
    workshop.assert_nothing_is_left()


def test_a_process_that_crashes_again_and_again_ends_the_run(workshop: Workshop) -> None:
    run = start(workshop, 10**8, env="environments:Exits")
    assert run.end() == 1, run.said
    assert "out of memory in the emulator" in run.said and "code 3" in run.said
    workshop.assert_nothing_is_left()


def test_polybeast_goes_on_with_a_run_that_monobeast_began_and_the_reverse(
    workshop: Workshop,
) -> None:
    learnt(workshop, 400, "--use_lstm")
    for program, steps in (("polybeast", 800), ("monobeast", 1200)):
        args = ["--env", "Catch", "--total_steps", str(steps), *SMALL, "--use_lstm"]
        code, said = workshop.run(program, *args)
        assert code == 0 and f"Resuming {workshop.run_folder('a')}" in said, said
        assert saved(workshop)["stats"]["step"] == steps
    code, said = workshop.run("monobeast", "--mode", "test", "--xpid", "a")
    assert code == 0 and "over 10 episodes" in said, said


def test_it_films_whole_episodes(workshop: Workshop) -> None:
    learnt(workshop, 400, "--model", "shallow", env="Mock")
    code, said = workshop.run(
        "monobeast", "--mode", "test_render", "--xpid", "a", "--num_episodes", "1"
    )
    assert code == 0 and "video.mp4" in said, said
    assert (workshop.run_folder("a") / "video.mp4").stat().st_size > 0


def test_with_a_fixed_lag_the_number_of_buffers_changes_nothing(workshop: Workshop) -> None:
    """Whole runs: the same losses and the same weights, whoever was faster."""
    args = ["--fixed_lag", "1", "--seed", "5", "--num_processes", "2"]
    for xpid, buffers in (("few", "2"), ("many", "6")):
        learnt(workshop, 2000, *args, "--num_buffers", buffers, "--xpid", xpid)
    few, many = (
        [(row["step"], row["total_loss"]) for row in read_logs(workshop.run_folder(xpid))]
        for xpid in ("few", "many")
    )
    assert len(few) == 50 and few == many


MEGABYTE = 2**20


def test_memory_is_flat_with_one_actor_and_two_buffers(workshop: Workshop) -> None:
    smallest = ["--num_actors", "1", "--num_buffers", "2", "--batch_size", "2"]
    run = start(workshop, 10**8, *smallest, "--use_lstm")
    for _ in range(2):
        run.wait_for(LEARNING)
    processes = [psutil.Process(run.pid), *workshop.actors()]
    before = [process.memory_info().rss for process in processes]
    for _ in range(3):
        run.wait_for(LEARNING)
    after = [process.memory_info().rss for process in processes]
    run.send(signal.SIGINT)
    assert run.end() == 0, run.said
    for process, then, now in zip(processes, before, after, strict=True):
        assert now - then < 10 * MEGABYTE, f"{process}: {then} -> {now}"
