# SPDX-License-Identifier: Apache-2.0
"""Bad input ends a run within seconds, with the right exit code and a message that names it."""

from __future__ import annotations

import signal

import pytest
import torch
from later import later
from programs import Workshop

from torchbeast.reporting.log_files import read_logs

SMALL = [
    "--num_servers",
    "1",
    "--num_envs",
    "2",
    "--batch_size",
    "2",
    "--unroll_length",
    "10",
    "--torch_threads",
    "1",
    "--total_steps",
    "2000",
    "--xpid",
    "a",
]

CANNOT_BE_MADE = [
    ("NoSuchEnvironment-v0", "NoSuchEnvironment"),
    ("no_such_module:make", "no_such_module"),
]
FAIL_WHILE_RUNNING = [
    ("Raises", ["KeyError: 'the joystick is gone'", "environments.py"]),
    later(
        "Exits",
        [
            "environment server 0",
            "5 processes died in its place",
            "exited with code 3",
            "out of memory in the emulator",
        ],
    ),
    later(
        "ExitsAtOnce",
        ["environment server 0", "exited with code 3", "no cartridge in the emulator"],
    ),
]


@pytest.mark.parametrize(("env", "names"), CANNOT_BE_MADE)
def test_an_environment_that_does_not_exist_is_refused_with_a_message(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], env: str, names: str
) -> None:
    assert workshop.call("polybeast", "--env", env, *SMALL) == 2
    said = "".join(capsys.readouterr())
    assert names in said and "Traceback" not in said and said.count("\n") == 1, said
    workshop.assert_nothing_is_left()


@pytest.mark.parametrize(("env", "words"), FAIL_WHILE_RUNNING)
def test_an_environment_that_fails_ends_the_run_and_says_why(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], env: str, words: list[str]
) -> None:
    assert workshop.call("polybeast", "--env", f"environments:{env}", *SMALL) == 1
    said = "".join(capsys.readouterr())
    for word in words:
        assert word in said, said
    assert "torchbeast/run/learner_run.py" not in said, "no traceback of ours"
    assert "Starting a replacement" not in said or env == "Exits", "all would die of that"
    assert "Traceback" in (workshop.run_folder("a") / "out.log").read_text() or "Exits" in env
    workshop.assert_nothing_is_left()


def test_an_environment_that_fails_later_is_made_anew_and_its_traceback_is_shown_once(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workshop.call("polybeast", "--env", "environments:RaisesTwice", *SMALL) == 0
    said = "".join(capsys.readouterr())
    assert "Warning: stream 0 gets new environments after failure 1 within 600 s" in said, said
    (again,) = [line for line in said.splitlines() if "after failure 2 within 600 s" in line]
    assert again.endswith("'the joystick is gone' (an earlier report has the traceback)")
    for text in (said, (workshop.run_folder("a") / "out.log").read_text()):
        assert "KeyError: 'the joystick is gone'" in text and "environments.py" in text
        assert text.count("Traceback (most recent call last)") == 1, text
    last = list(read_logs(workshop.run_folder("a")))[-1]
    assert (last["restarted_streams"], last["retired_streams"]) == (2, 0)
    workshop.assert_nothing_is_left()


def test_more_streams_than_there_are_cannot_be_needed(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workshop.call("polybeast", "--env", "Catch", *SMALL, "--min_streams", "9") == 2
    said = capsys.readouterr().err
    assert "--min_streams 9 is more than the 1 stream of the servers" in said
    workshop.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize("env", ["Truncated", *map(later, ["Legacy", "NeverWithTorch"])])
def test_a_users_own_environment_is_trained_on(workshop: Workshop, env: str) -> None:
    code, said = workshop.run("polybeast", "--env", f"environments:{env}", *SMALL)
    assert code == 0, said
    assert "Mean return 10.00" in said, said
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_an_environment_that_hangs_does_not_keep_ctrl_c_from_ending_the_run(
    workshop: Workshop,
) -> None:
    run = workshop.start("polybeast", "--env", "environments:Stuck", *SMALL)
    run.wait_for("steps")
    run.send(signal.SIGINT)
    assert run.end() == 0, run.said
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_a_loss_that_is_not_finite_keeps_the_checkpoint_before_it(workshop: Workshop) -> None:
    args = [*SMALL, "--env", "environments:HugeReward", "--normalise_returns", "false"]
    code, said = workshop.run("polybeast", *args)
    assert code == 1, said
    assert "baseline_loss is inf" in said and "Traceback" not in said
    assert not (workshop.run_folder("a") / "model.tar").exists()
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_a_checkpoint_of_something_else_is_refused_and_kept(workshop: Workshop) -> None:
    code, said = workshop.run("polybeast", "--env", "Catch", *SMALL)
    assert code == 0, said
    path = workshop.run_folder("a") / "model.tar"
    before = path.read_bytes()
    for more, names in (
        (["--use_lstm"], "--use_lstm must be False, as in the run a, not True"),
        (["--env", "environments:Plain"], "--env must be Catch"),
    ):
        args = ["--env", "Catch", *SMALL, "--total_steps", "4000", *more]
        code, said = workshop.run("polybeast", *args)
        assert code == 2, said
        assert names in said and "Traceback" not in said, said
        assert path.read_bytes() == before
        workshop.assert_nothing_is_left()


MODEL = """
import torch
from torchbeast.core.actors.contract import ActorCritic, ModelOutput

class Constant(ActorCritic):
    def __init__(self, observation_space, action_space, use_lstm):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, inputs, core_state):
        rows, columns = inputs.reward.shape
        logits = self.weight.expand(rows, columns, 3)
        return ModelOutput(logits, self.weight.expand(rows, columns), core_state)
"""


@pytest.mark.long
def test_a_users_own_model_is_trained_saved_and_evaluated(workshop: Workshop) -> None:
    (workshop.folder / "models.py").write_text(MODEL)
    args = ["--env", "Catch", *SMALL, "--model", "models:Constant"]
    code, said = workshop.run("polybeast", *args)
    assert code == 0, said
    saved = torch.load(workshop.run_folder("a") / "model.tar", weights_only=True)
    assert list(saved["model_state_dict"]) == ["weight"]
    code, said = workshop.run("polybeast", "--mode", "test", "--xpid", "a")
    assert code == 0 and "over 10 episodes" in said, said
