# SPDX-License-Identifier: Apache-2.0
"""Programs that learn from a replay too."""

from __future__ import annotations

import itertools
import re
import signal

import pytest
import torch
from later import later
from programs import Workshop, each_program

from torchbeast.reporting.log_files import read_logs

T, B = 10, 4
SMALL = [
    *("--env", "Catch", "--num_envs", "4", "--batch_size", str(B), "--unroll_length", str(T)),
    *("--torch_threads", "1", "--seed", "1", "--xpid", "a"),
]
ONE = {"monobeast": ["--num_workers", "1"], "polybeast": ["--num_servers", "1"]}
REPLAY = ["--replay_size", "2000", "--replay_ratio", "2"]
STEPS = 2000


def run(workshop: Workshop, program: str, *args: str, code: int = 0) -> str:
    found, said = workshop.run(program, *SMALL, *ONE[program], *args)
    assert found == code, said
    return said


def rows(workshop: Workshop, xpid: str = "a") -> list[dict[str, float]]:
    return list(read_logs(workshop.run_folder(xpid)))


@pytest.mark.parametrize(
    ("program", "memory"),
    [
        ("polybeast", []),
        later("monobeast", ["--use_lstm"]),
        later("polybeast", ["--use_lstm"]),
        later("monobeast", []),
    ],
)
def test_a_run_learns_from_new_and_replayed_rollouts(
    workshop: Workshop, program: str, memory: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, *ONE[program], *REPLAY, *memory, "--total_steps", str(STEPS)]
    assert workshop.call(program, *words) == 0
    assert "Replay buffer: 2,000 steps" in capsys.readouterr().out
    assert workshop.meta("a")["args"]["algo"] == "laser"
    logged = rows(workshop)
    assert [row["step"] for row in logged] == list(range(T * B, STEPS + 1, T * B))
    counts = [row["learnt_steps"] for row in logged]
    learnt = [after - before for before, after in itertools.pairwise(counts)]
    new_alone = learnt.index(3 * T * B)  # the first with replayed rollouts has twice as many
    assert learnt == [T * B] * new_alone + [3 * T * B] * (len(learnt) - new_alone)
    assert new_alone < 10 and logged[-1]["episodes"] == STEPS // 9 // 4 * 4
    last = logged[-1]
    assert 0.9 < last["replay_fill"] <= 1 and 1.5 < last["samples_per_insert"] <= 2.1
    assert 0 <= last["relevant_share"] <= 1 and last["replay_kl"] >= 0
    assert last["replay_age"] > last["mean_lag"]
    workshop.assert_nothing_is_left()


@pytest.mark.long
@pytest.mark.parametrize(
    "memory",
    [
        later([]),
        later(["--use_lstm"]),
        ["--algo", "r2d2", "--burn_in", "5", "--learn_start", "100"],
        later(["--env", "environments:Poor,environments:Rich", "--popart"]),
        later(["--use_lstm", "--model_kwargs", '{"core": "gtrxl"}']),
    ],
)
def test_a_fixed_lag_makes_runs_with_a_replay_reproducible(
    workshop: Workshop, memory: list[str]
) -> None:
    weights = []
    for xpid in ("first", "second"):
        words = ["--xpid", xpid, "--fixed_lag", "1", *memory, "--total_steps", str(STEPS)]
        run(workshop, "monobeast", *REPLAY, *words)
        path = workshop.run_folder(xpid) / "model.tar"
        weights.append(torch.load(path, weights_only=True)["model_state_dict"])
    assert rows(workshop, "first")[-1]["replay_age"] > 1
    for name, first in weights[0].items():
        assert torch.equal(first, weights[1][name]), name


@pytest.mark.long
@each_program("monobeast", "polybeast")
def test_a_resumed_run_says_what_is_in_its_replay(workshop: Workshop, program: str) -> None:
    run(workshop, program, *REPLAY, "--total_steps", "800")
    said = run(workshop, program, "--total_steps", "1200", "--checkpoint_replay")
    assert "The replay starts empty: there is no" in said and "replay.bin yet." in said, said
    assert (workshop.run_folder("a") / "replay.bin").exists()
    said = run(workshop, program, "--total_steps", "1600")
    assert re.search(r"The replay continues with the 3\d\d steps in .*/a/replay.bin\.", said), said
    resumed = [row for row in rows(workshop) if row["step"] > 1200]
    assert "relevant_share" in resumed[0], "from the first batch on"
    assert resumed[0]["replay_age"] > 5


@pytest.mark.long
def test_a_saved_replay_of_other_rollouts_is_a_sentence(workshop: Workshop) -> None:
    run(workshop, "monobeast", *REPLAY, "--checkpoint_replay", "--total_steps", "800")
    other = ["--unroll_length", "20", "--total_steps", "1600"]
    said = run(workshop, "monobeast", *other, code=2)
    assert "replay.bin" in said and "unroll_length" in said and "move it away" in said, said
    assert "Traceback" not in said and torch.load(
        workshop.run_folder("a") / "model.tar", weights_only=True
    )


@pytest.mark.long
@each_program("polybeast", "monobeast")
def test_ctrl_c_ends_a_run_with_a_replay(workshop: Workshop, program: str) -> None:
    started = workshop.start(
        program, *SMALL, *ONE[program], *REPLAY, "--checkpoint_replay", "--total_steps", "10000000"
    )
    started.wait_for("[1-9] % relevant|100 % relevant")
    started.send(signal.SIGINT)
    assert started.end() == 0, started.said
    for name in ("model.tar", "replay.bin"):
        assert (workshop.run_folder("a") / name).exists()
    workshop.assert_nothing_is_left()


def test_a_replay_that_does_not_fit_into_memory_is_a_sentence(
    workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, *ONE["monobeast"], "--replay_size", "2000000000"]
    assert workshop.call("monobeast", *words) == 2
    said = capsys.readouterr().err
    for part in ("--replay_size 2000000000 needs", "243 bytes a step", "are free", "at most"):
        assert part in said, said
    assert "Traceback" not in said
    workshop.assert_nothing_is_left()


@pytest.mark.long
def test_cartpole_is_learnt_with_a_replay(workshop: Workshop) -> None:
    words = ["--preset", "cartpole", "--replay_size", "50000", "--total_steps", "60000"]
    code, said = workshop.run(
        "monobeast", *words, "--xpid", "a", "--torch_threads", "1", "--seed", "1", timeout=200.0
    )
    assert code == 0, said
    match = re.search(r"Mean return ([\d.]+) and length", said)
    assert match and float(match[1]) > 100, said
