# SPDX-License-Identifier: Apache-2.0
"""Every way in which a run ends, and the files and processes that it leaves."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence

import pytest
from background import wait_for
from later import later
from programs import BUSY_S, LEARNING, Program, Workshop, each_program

from torchbeast.reporting.log_files import read_logs
from torchbeast.reporting.run_folder import run_path

PROCESSES = {"polybeast": "--num_servers", "monobeast": "--num_workers"}
SMALL = [
    "--num_envs",
    "4",
    "--batch_size",
    "4",
    "--unroll_length",
    "10",
    "--torch_threads",
    "1",
    "--model",
    "mlp",
]
# An algorithm whose first update asks the run to stop, and then never leaves torch's code for long.
ENDLESS = """
import os, signal, torch
from torchbeast.core.algos.impala import IMPALA
from torchbeast.run import learner_run

learner_run._JOIN_S = 0.1

class Endless(IMPALA):
    separable = False  # one thread sends one signal

    def losses(self, minibatch):
        os.kill(os.getpid(), signal.SIGTERM)
        matrix = torch.ones(500, 500)
        while True:
            matrix @ matrix
"""


def catch(
    workshop: Workshop,
    xpid: str,
    total_steps: int,
    *more: str,
    program: str = "polybeast",
    env: str = "Catch",
    by: Sequence[str] = (),
) -> Program:
    parts = ["--total_steps", str(total_steps), PROCESSES[program], "2", *SMALL, *more]
    return workshop.start(program, "--env", env, "--xpid", xpid, *parts, by=by)


@each_program("polybeast", "monobeast")
def test_a_run_leaves_its_files_and_nothing_else(
    workshop: Workshop, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--env", "Catch", "--xpid", "a", "--total_steps", "2000", PROCESSES[program], "2"]
    assert workshop.call(program, *words, *SMALL) == 0
    names = {path.name.split(".", 1)[0] for path in workshop.run_folder("a").iterdir()}
    assert names == {"meta", "out", "logs", "fields", "model", "events"}
    assert run_path(workshop.folder / "runs" / "latest") == workshop.run_folder("a").resolve()
    meta = workshop.meta("a")
    assert meta["successful"] is True and meta["args"]["env"] == "Catch"
    assert workshop.saved_step() == 2000
    said = capsys.readouterr().out
    for part in ("--mode test", "-m torchbeast.plot", "--xpid a", "steps/s"):
        assert part in said, said
    workshop.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("program", "number"),
    [
        ("polybeast", signal.SIGINT),
        later("polybeast", signal.SIGTERM),
        later("polybeast", signal.SIGHUP),
        later("monobeast", signal.SIGINT),
    ],
)
def test_a_signal_saves_and_the_same_command_resumes(
    workshop: Workshop, program: str, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    first = catch(workshop, "a", 10**8, program=program)
    first.wait_for(LEARNING)
    assert workshop.call(program, "--env", "Catch", "--xpid", "a", *SMALL) == 1
    assert "another process is running in" in capsys.readouterr().err
    first.send(number)
    assert first.end(timeout=15 + BUSY_S) == 0, first.said
    assert f"Stopped by {number.name}" in first.said and "Traceback" not in first.said
    workshop.assert_nothing_is_left()
    step = workshop.saved_step()
    assert step > 0

    command = ["--env", "Catch", "--xpid", "a", PROCESSES[program], "2", *SMALL]
    assert workshop.call(program, *command, "--total_steps", str(step + 400)) == 0
    assert re.search(rf"Resuming .* at step {step:,}", capsys.readouterr().out)
    assert workshop.saved_step() == step + 400
    logged = (workshop.run_folder("a") / "out.log").read_text()
    assert logged.count(f"] Stopped by {number.name}.") == logged.count("] Resuming ") == 1
    rows = list(read_logs(workshop.run_folder("a")))
    assert [row["_tick"] for row in rows] == list(range(len(rows)))
    assert [row["step"] for row in rows] == [40 * (n + 1) for n in range(len(rows))]


@each_program("polybeast", "monobeast", "raybeast")
def test_a_signal_during_an_update_that_does_not_end_still_ends_the_program_in_order(
    workshop: Workshop, program: str
) -> None:
    """If Python were finalised while the learner thread is in torch, the program would abort."""
    (workshop.folder / "endless.py").write_text(ENDLESS)
    flags = ["--xpid", "a", "--env", "Catch", "--algo", "endless:Endless", "--num_envs", "2"]
    run = workshop.start(program, *flags, "--batch_size", "2", "--model", "mlp")
    assert run.end() == 0, run.said
    assert re.search(r"threads that did not end within 0.1 s: .*'learner-0'", run.said), run.said
    assert run.said.endswith("Stopped by SIGTERM.\n") and workshop.meta("a")["successful"]
    workshop.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize("program", ["polybeast", "monobeast"])
def test_a_signal_to_every_process_of_a_run_stops_it_in_order(
    workshop: Workshop, program: str
) -> None:
    """Systemd and Slurm do this; here the program itself gets the signal last."""
    run = catch(workshop, "a", 10**8, program=program)
    run.wait_for(LEARNING)
    processes = workshop.processes()
    assert len(processes) == 3
    for process in sorted(processes, key=lambda process: process.pid == run.pid):
        process.send_signal(signal.SIGTERM)
    assert run.end(timeout=15 + BUSY_S) == 0, run.said
    assert "Stopped by SIGTERM" in run.said and "replacement" not in run.said
    assert workshop.meta("a")["successful"] is True
    assert workshop.saved_step() > 0
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_a_complete_run_continues_in_either_program_and_is_evaluated(workshop: Workshop) -> None:
    assert catch(workshop, "a", 400).end() == 0
    code, said = workshop.run("polybeast", "--xpid", "a")
    assert code == 0 and "Run a is already complete (400/400 steps)." in said, said
    more = ["--xpid", "a", "--learning_rate", "0.0004", "--total_steps"]
    for program, steps, changes_rate in (("polybeast", 800, True), ("monobeast", 1200, False)):
        code, said = workshop.run(program, *more, str(steps))
        assert code == 0 and f"at step {steps - 400}." in said, said
        lines = [line for line in said.splitlines() if "(previously" in line]
        assert lines == [f"total_steps {steps} (previously {steps - 400})"]
        assert ("learning_rate 0.0004 from step 400 on (was 0)" in said) == changes_rate, said
        assert workshop.saved_step() == steps
    assert workshop.meta("a")["args"]["env"] == "Catch"
    code, said = workshop.run("polybeast", "--mode", "test")
    assert code == 0 and said.startswith("Testing the latest run, a.\nCatch, "), said
    workshop.assert_nothing_is_left()


@each_program("polybeast", "monobeast")
def test_a_killed_learner_leaves_no_process_or_socket_and_its_run_resumes(
    workshop: Workshop, program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not even a program that an environment has started is left."""
    simulated = {"program": program, "env": "environments:Simulated"}
    run = catch(workshop, "a", 10**8, "--checkpoint_interval", "1", **simulated)
    run.wait_for(LEARNING)
    wait_for(lambda: (workshop.run_folder("a") / "model.tar").exists())
    if program == "polybeast":
        assert workshop.servers() and workshop.sockets()
    else:
        assert len(workshop.actors()) == 2
    # one worker alone may have filled the batch: wait for the environments of the other
    wait_for(lambda: len(workshop.processes("torchbeast.simulator")) >= 4)
    run.send(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    workshop.assert_nothing_is_left()
    step = workshop.saved_step()
    assert workshop.call(program, "--xpid", "a", "--total_steps", str(step + 400)) == 0
    assert f"at step {step:,}." in capsys.readouterr().out


@pytest.mark.long
def test_a_run_that_ends_while_its_servers_are_replaced_leaves_nothing(workshop: Workshop) -> None:
    run = catch(workshop, "a", 10**8)
    run.wait_for(LEARNING)
    for server in workshop.servers():
        server.kill()
    run.wait_for("Starting a replacement")
    run.send(signal.SIGINT)
    assert run.end() == 0, run.said
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_two_simultaneous_runs_do_not_interfere(workshop: Workshop) -> None:
    runs = [catch(workshop, name, 2000) for name in ("a", "b")]
    for run in runs:
        assert run.end() == 0, run.said
    workshop.assert_nothing_is_left()
