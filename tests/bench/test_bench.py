# SPDX-License-Identifier: Apache-2.0
"""The program as a user calls it, with measurements that are too short for some stages."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from bench import inference, program
from bench.limits import END_TO_END, STAGES
from bench.stages import SINGLE
from later import later
from warm import children

from torchbeast.bench import main
from torchbeast.core.algos.base import Losses
from torchbeast.core.algos.impala import IMPALA
from torchbeast.core.algos.unroll import unroll
from torchbeast.core.storages.rollout import Rollout
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.servers.source import answer

SMALL = [
    *("--env", "Catch", "--model", "mlp", "--num_envs", "2", "--num_servers", "1"),
    *("--torch_threads", "1", "--unroll_length", "5", "--batch_size", "2"),
    *("--seconds", "0.01", "--repeats", "1", "--disable_cuda"),
]
PYTHON_ONLY = ("environment", "inference", "learner")


@pytest.fixture(autouse=True)
def nothing_left(runtime_folder: Path) -> Iterator[None]:
    """Checks that a test leaves no processes and sockets, and restores the number of threads."""
    threads, before = torch.get_num_threads(), children(recursive=True)
    yield
    torch.set_num_threads(threads)
    started = [p for p in children(recursive=True) if p not in before]
    _, alive = psutil.wait_procs(started, timeout=15)
    assert alive == []
    assert list(runtime_folder.iterdir()) == []


@pytest.fixture
def without_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libtorchbeast", None)


def test_an_installed_package_says_where_the_measurements_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchbeast.bench._FOLDER", tmp_path)
    assert main(["--help"]) == 2
    assert "run this in a clone of the repository" in capsys.readouterr().err


def test_every_stage_is_in_the_table_and_in_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("libtorchbeast._C")
    pytest.importorskip("matplotlib")
    files = ["--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")]
    assert main([*SMALL, *files]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in (*STAGES, END_TO_END, "predicted", "Bottleneck: ")), said
    record = json.loads((tmp_path / "b.json").read_text())
    assert set(record["stages"]) == {*STAGES, SINGLE, END_TO_END}
    for stage in record["stages"].values():
        assert stage["steps_per_second"] > 0
        assert stage["every_steps_per_second"] == [stage["steps_per_second"]]
    assert record["settings"]["env"] == "Catch"
    assert record["sentence"] in said.replace("\n", " ")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


class Own(IMPALA):
    """Acts greedily and needs the values that it predicted then, but no logits."""

    needs = ("baseline",)
    mode = "greedy"

    def losses(self, minibatch: Rollout) -> Losses:
        assert set(minibatch.extras) == {"baseline"}
        _, values, _, _ = unroll(self.actor, minibatch)
        return Losses({"value_loss": values.square().sum()})


@pytest.mark.usefixtures("without_compiled")
def test_the_stages_are_those_of_the_algorithm_that_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes = []

    def recorded(*args: Any) -> Any:
        modes.append(args[4])
        (_, extras), _ = answered = answer(*args)
        assert set(extras) == {"baseline"}
        return answered

    monkeypatch.setattr(inference, "answer", recorded)
    assert main([*SMALL, "--algo", f"{__name__}:Own"]) == 0
    assert set(modes) == {"greedy"}


@pytest.mark.usefixtures("without_compiled")
def test_without_the_compiled_module_its_stages_are_left_out_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--json", str(tmp_path / "b.json")]) == 0
    said = capsys.readouterr().out
    assert "left out, because the compiled module libtorchbeast is not installed" in said.replace(
        "\n", " "
    )
    record = json.loads((tmp_path / "b.json").read_text())
    assert tuple(record["stages"]) == PYTHON_ONLY
    assert record["predicted_steps_per_second"] is None


@pytest.mark.usefixtures("without_compiled")
def test_an_environment_that_fails_is_reported_with_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = [str(Path(__file__).parent), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    assert main([*SMALL, "--env", "bench_envs:Raises"]) == 1
    said = capsys.readouterr().err
    assert "bench: environment process 0: " in said
    assert "the joystick is gone" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seconds", "0"], "--seconds must be greater than 0"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--xpid", "a"], "--xpid"),
        (["--png", "b.jpg"], "must end in .png"),
        (["--png", "/no/such/b.png"], "a folder that exists"),
        (["--json", "/no/such/b.json"], "a folder that exists"),
        (["--hosts", "2", "--png", "b.png"], "remove one of the two"),
        (["--env", "NoSuchEnvironment-v0"], "NoSuchEnvironment"),
        (["--model", "nosuch"], "nosuch"),
    ],
)
def test_wrong_usage_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--png" in words:
        pytest.importorskip("matplotlib")
    assert main([*SMALL, *words]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_machine_that_others_use_is_reported() -> None:
    assert program.others(load=0.4, cores=2) == ""
    assert "load 3.0 on 2 cores" in program.others(load=3.0, cores=2)


@pytest.mark.parametrize("stage", [later("environment"), later("transport"), END_TO_END])
def test_ctrl_c_ends_a_long_measurement(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if stage in PYTHON_ONLY:  # cheaper to set up
        monkeypatch.setitem(sys.modules, "libtorchbeast", None)
    else:
        pytest.importorskip("libtorchbeast._C")
    calls, wait = itertools.count(), Supervisor.wait

    def interrupting(supervisor: Supervisor, timeout: float) -> bool:
        if next(calls) == 1:  # the first is before the measurement
            os.kill(os.getpid(), signal.SIGINT)
        return wait(supervisor, timeout)

    def only_this_stage(runs: Mapping[str, Callable[[], Any]], repeats: int) -> Any:
        monkeypatch.setattr(Supervisor, "wait", interrupting)
        return runs[stage]()

    monkeypatch.setattr(program, "interleaved", only_this_stage)
    assert main([*SMALL, "--seconds", "1000"]) == 0
    assert next(calls) > 1
    said = capsys.readouterr()
    assert "Stopped by SIGINT.\n" in said.out and said.err == ""


def test_with_hosts_it_predicts_what_one_learner_makes_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("libtorchbeast._C")
    record = tmp_path / "b.json"
    assert main([*SMALL, "--hosts", "100", "--json", str(record)]) == 0
    said = capsys.readouterr().out
    assert "100 hosts make" in said and "limit of one learner" in said
    limits = json.loads(record.read_text())["limits"]
    assert set(limits) >= {"environments", "cores", "learning"}
    assert f"{min(limits.values()):,.0f} steps/s with one learner" in said.replace("\n", " ")


def test_an_algorithm_that_learns_from_other_batches_is_refused_with_both_kinds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--algo", "off_policy:Toy", "--replay_size", "1000"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("bench: bench measures rollouts: choose an") and said.out == ""


@pytest.mark.usefixtures("without_compiled")
def test_with_a_replay_it_is_a_stage_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stacked frames are taken apart by the replay and put together again."""
    path = [str(Path(__file__).parents[1] / "support"), *sys.path]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    stacked = ["--env", "source_envs:Stacked", "--model", "shallow", "--replay_size", "100"]
    assert main([*SMALL, *stacked]) == 0
    said = capsys.readouterr().out
    assert "Replay buffer: 100 steps" in said
    assert all(f"│ {name} " in said for name in (*PYTHON_ONLY, "replay", "replay, shared")), said
