# SPDX-License-Identifier: Apache-2.0
"""Workers may only step environments, whose actions are chosen in the learner's process."""

from __future__ import annotations

import _thread
import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from background import wait_for
from small_schemes import impala_of, scheme_of
from source_envs import Raises
from warm import children

import torchbeast
from torchbeast import Learner, RunError, polybeast
from torchbeast.envs import make
from torchbeast.fleets import waiting
from torchbeast.reporting.log_files import read_logs
from torchbeast.run import watch
from torchbeast.schemes import Scheme

CENTRAL = {"col_remote_workers": 2, "col_communication": "asynchronous", "inference": "central"}


def test_it_learns_with_bounded_lag_and_leaves_no_process_and_no_socket(
    tmp_path: Path, runtime_folder: Path
) -> None:
    with Learner(impala_of(**CENTRAL), 10**6, tmp_path / "run", seed=1) as learner:
        before = {name: weights.clone() for name, weights in learner.actor.state_dict().items()}
        found = [learner.step() for _ in range(6)]
        assert len(children()) == 2 and len(list(runtime_folder.glob("*/*"))) == 2
        after = learner.actor.state_dict()
        wait_for(lambda: learner.step()["live_streams"] == 2)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert all(metrics["max_lag"] <= 8 for metrics in found), "the queue bounds it"
    assert children() == [] and list(runtime_folder.iterdir()) == []


def test_a_step_that_waits_for_an_environment_can_be_interrupted_and_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "WAIT_S", 0.0)
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    interrupts = [_thread.interrupt_main]
    monkeypatch.setattr(watch, "warn", lambda *_, **__: interrupts.pop()() if interrupts else None)
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    envs = {"env_fn": torchbeast.make_env, "env_kwargs": {"env": "source_envs:FirstHangs"}}
    axes = {**CENTRAL, "col_remote_workers": 1}
    scheme = impala_of(envs={**envs, "vec_env_size": 1}, **axes)
    with Learner(scheme, 10**6, tmp_path / "run") as learner:
        with pytest.raises(KeyboardInterrupt):
            learner.step()
        wait_for((tmp_path / "marker").exists)
        (hanging,) = children()
        os.kill(hanging.pid, signal.SIGKILL)  # another process takes its place
        assert learner.step()["step"] > 0


def test_a_learner_that_never_steps_leaves_no_folder(tmp_path: Path, runtime_folder: Path) -> None:
    Learner(impala_of(**CENTRAL), 10**6, tmp_path / "run").close()
    assert list(runtime_folder.iterdir()) == []


def test_every_environment_has_a_seed_of_its_own(tmp_path: Path) -> None:
    numbered = {"env_fn": torchbeast.make_env, "env_kwargs": {"env": "source_envs:Numbered"}}
    scheme = scheme_of({**numbered, "vec_env_size": 3}, **CENTRAL)
    seeds: dict[int, float] = {}
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        while len(seeds) < 6:
            batch: Any = learner._started().next_batch()
            first = batch.observation[0, :, 0].tolist()
            seeds.update(zip(batch.env_index[0].tolist(), first, strict=True))
    assert len(set(seeds.values())) == 6


def test_a_worker_that_is_killed_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    with Learner(impala_of(**CENTRAL), 10**6, tmp_path / "run") as learner:
        # A stream that is lost before it first plays does not count as lost.
        wait_for(lambda: learner.step()["live_streams"] == 2)
        (killed, *_) = children()
        os.kill(killed.pid, signal.SIGKILL)
        wait_for(lambda: learner.step()["lost_streams"] == 1)
        wait_for(lambda: learner.step()["live_streams"] == 2)
        assert len(children()) == 2 and killed not in children()


def test_an_exception_in_an_environment_ends_the_run_with_its_lines(tmp_path: Path) -> None:
    scheme = impala_of(envs={"env_fn": Raises, "vec_env_size": 2}, **CENTRAL)
    learner = Learner(scheme, 10**6, tmp_path / "run")
    with pytest.raises(RunError, match=r"(?s)in step.*KeyError: 'the joystick is gone'"):
        learner.train()
    assert children() == []
    assert json.loads((tmp_path / "run" / "meta.json").read_text())["successful"] is False


def test_a_learner_that_is_forgotten_ends_its_processes(tmp_path: Path) -> None:
    learner = Learner(impala_of(**CENTRAL), 10**6, tmp_path / "run")
    learner.step()
    processes = children()
    assert len(processes) == 2
    del learner
    gc.collect()
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []


def test_polybeast_resumes_the_run(tmp_path: Path) -> None:
    envs = {"env_fn": make, "env_kwargs": {"env": "Catch"}, "vec_env_size": 2}
    with Learner(impala_of(envs=envs, **CENTRAL), 40, tmp_path / "run") as learner:
        learner.train()
    named = ["--savedir", str(tmp_path), "--xpid", "run"]
    assert polybeast.main([*named, "--total_steps", "80"]) == 0
    assert [row["step"] for row in read_logs(tmp_path / "run")][-1] == 80
    recorded = json.loads((tmp_path / "run" / "meta.json").read_text())["args"]
    assert recorded["num_servers"] == 2 and recorded["num_envs"] == 4


def test_the_preset_seed_is_impala_with_central_inference() -> None:
    envs = impala_of().train_envs_factory
    assert Scheme.preset("seed", envs).inference == "central"
    assert Scheme.preset("impala", envs).inference == "worker"
