# SPDX-License-Identifier: Apache-2.0
"""RayBeast as a whole: on a Ray of its own, and on a cluster of the user's."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from later import later
from programs import LEARNING, Program, Workshop
from ray_clusters import small_cluster

from torchbeast.on_ray.replay import serving_on_ray
from torchbeast.reporting.log_files import read_logs

ray = pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def temporary_folder(runtime_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a Ray that is started here has its files."""
    monkeypatch.setenv("TMPDIR", str(runtime_folder))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster that no test starts or ends."""
    with small_cluster() as made:
        yield made


def small(workshop: Workshop, total_steps: int, *more: str, env: str = "Catch") -> Program:
    words = [
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
    steps = str(total_steps)
    return workshop.start("raybeast", "--env", env, "--total_steps", steps, *words, *more)


def processes(workshop: Workshop) -> list[psutil.Process]:
    """All processes of this test's programs, those of Ray too, by the folder that they inherit."""
    found = []
    for process in psutil.process_iter(["environ"]):
        where = (process.info["environ"] or {}).get("XDG_RUNTIME_DIR")
        if where == str(workshop.runtime_folder):
            found.append(process)
    return found


def actors(workshop: Workshop) -> list[psutil.Process]:
    return [p for p in processes(workshop) if "TorchBeastRolloutWorker" in " ".join(p.cmdline())]


def assert_nothing_is_left(workshop: Workshop) -> None:
    _, alive = psutil.wait_procs(processes(workshop), timeout=60)
    assert alive == []
    assert list(workshop.runtime_folder.glob("torchbeast-ray-*")) == []


@pytest.mark.parametrize("kills", [False, later(True)], ids=["none is killed", "one is killed"])
def test_a_killed_actor_is_replaced_and_the_run_leaves_nothing(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, kills: bool
) -> None:
    monkeypatch.setenv("HOME", str(workshop.folder))
    run = small(workshop, 10**8, "--num_workers", "2")
    run.wait_for(LEARNING)
    if kills:
        actors(workshop)[-1].kill()
        # Which process and where is known once it plays; it may still start while the other does.
        run.wait_for(r"worker \d: .* died.*\. Starting a replacement")
        run.wait_for(LEARNING)
    run.send(signal.SIGINT)
    assert run.end() == 0, run.said
    assert "Traceback" not in run.said and "raylet" not in run.said, run.said
    assert_nothing_is_left(workshop)
    assert not (workshop.folder / ".ray").exists(), "where Ray would leave a token"


@pytest.mark.long
def test_catch_is_learnt(workshop: Workshop) -> None:
    words = ["--preset", "catch", "--seed", "1", "--xpid", "a", "--torch_threads", "1"]
    code, said = workshop.run("raybeast", *words, "--num_workers", "2", timeout=200)
    assert code == 0, said
    args = ["--mode", "test", "--xpid", "a", "--num_episodes", "100", "--seed", "2"]
    code, said = workshop.run("raybeast", *args)
    match = re.search(r"Mean (-?[\d.]+), median", said)
    assert code == 0 and match and float(match[1]) >= 0.9, said


@pytest.mark.long
def test_it_learns_from_a_replay_too(workshop: Workshop) -> None:
    run = small(workshop, 2000, "--replay_size", "2000", "--replay_ratio", "2")
    assert run.end() == 0, run.said
    *_, last = read_logs(workshop.run_folder("a"))
    assert last["step"] == 2000 and last["learnt_steps"] > 5000
    assert last["samples_per_insert"] > 1.5 and last["replay_age"] > last["mean_lag"]


@pytest.mark.long
def test_a_killed_learner_takes_its_ray_with_it(workshop: Workshop) -> None:
    run = small(workshop, 10**8, "--checkpoint_interval", "1")
    run.wait_for(LEARNING)
    assert len(processes(workshop)) > 4
    run.send(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    _, alive = psutil.wait_procs(processes(workshop), timeout=60)
    assert alive == []


@pytest.mark.long
def test_ctrl_c_saves_and_leaves_the_users_cluster_as_it_was(
    workshop: Workshop, cluster: Any
) -> None:
    """The environment is in a module of the user's, which Ray copies to the cluster."""
    where = ["--address", cluster.address]
    run = small(workshop, 10**8, *where, "--num_workers", "2", env="environments:Legacy")
    run.wait_for(LEARNING)
    run.send(signal.SIGINT)
    assert run.end() == 0, run.said
    assert "Stopped by SIGINT" in run.said and "Traceback" not in run.said, run.said
    step = workshop.saved_step()
    assert step > 0
    more = ["--xpid", "a", "--total_steps", str(step + 400)]
    code, said = workshop.run("raybeast", *more, *where)
    assert code == 0 and f"at step {step:,}" in said, said
    assert workshop.saved_step() == step + 400
    code, said = workshop.run("monobeast", "--xpid", "a", "--total_steps", str(step + 800))
    assert code == 0 and workshop.saved_step() == step + 800, said
    assert processes(workshop) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("more", "env", "code", "words"),
    [
        (["--num_workers", "3"], "Catch", 2, ["3 Ray actors", "1 node with 2 CPUs"]),
        (["--learner_gpus", "1"], "Catch", 2, ["--learner_gpus 1 are not free on this machine"]),
        (
            ["--unroll_length", "90000"],
            "Catch",
            2,
            ["rollouts of", "Ray's object store", "80.0 MB"],
        ),
        ([], "environments:Raises", 1, ["worker ", "KeyError: 'the joystick is gone'"]),
    ],
    ids=["cpus", "gpus", "store", "raises"],
)
def test_what_cannot_be_ends_the_run_with_a_sentence(
    workshop: Workshop, cluster: Any, more: list[str], env: str, code: int, words: list[str]
) -> None:
    run = small(workshop, 10**6, "--address", cluster.address, *more, env=env)
    assert run.end() == code, run.said
    for word in words:
        assert word in run.said, run.said
    assert "learner_run.py" not in run.said, "no traceback of ours"


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9"])
def test_an_address_without_a_cluster_is_told(
    workshop: Workshop, capsys: pytest.CaptureFixture[str], address: str
) -> None:
    assert workshop.call("raybeast", "--env", "Catch", "--address", address) == 1
    said = capsys.readouterr().err
    assert f"no Ray cluster at --address {address} (Connection refused)" in said, said


def test_without_ray_it_is_told_what_to_install(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # its import fails
    assert workshop.call("raybeast", "--env", "Catch") == 1
    said = capsys.readouterr().err
    assert "pip install 'torchbeast[ray]'" in said and "Traceback" not in said, said


@pytest.mark.long
def test_monobeast_learns_from_a_replay_on_ray_stops_as_always_and_ends_with_it(
    workshop: Workshop, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    words = ["--env", "Catch", "--num_envs", "4", "--num_workers", "1", "--batch_size", "4"]
    words += ["--unroll_length", "10", "--torch_threads", "1", "--xpid", "a"]
    with serving_on_ray("catch") as served:
        shared = ["--replay_size", "4000", "--replay_ratio", "2"]
        shared += ["--replay_service", served.address]
        for number in (signal.SIGINT, signal.SIGTERM, None):
            run = workshop.start("monobeast", *words, *shared, "--total_steps", "100000000")
            run.wait_for("The replay, shared with other agents, holds 4,000 steps")
            run.wait_for("[1-9] % relevant|100 % relevant")
            if number is not None:
                run.send(number)
                assert run.end() == 0 and f"Stopped by {number.name}" in run.said, run.said
        psutil.Process(served.pid).kill()
        assert run.end() == 1, run.said
    assert "the shared replay ray:catch has ended; progress is saved in the checkpoint" in run.said
    assert "Traceback" not in run.said and workshop.saved_step() > 0
