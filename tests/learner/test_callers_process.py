# SPDX-License-Identifier: Apache-2.0
"""A Learner leaves its caller's process as it was, and relies on none of the caller's settings."""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from later import later
from small_schemes import off_policy_of, scheme_of

from torchbeast import Learner
from torchbeast.collect import local as local_source
from torchbeast.envs import make
from torchbeast.fleets import waiting
from torchbeast.run import watch
from torchbeast.schemes import Scheme

THREADS = 3  # of the caller's operations; a Learner of small batches uses one


@pytest.fixture(autouse=True)
def callers_settings() -> Iterator[None]:
    before, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)
    torch.set_default_dtype(dtype)


def settings() -> dict[str, Any]:
    """Returns the settings of the process now, and those of torch in a new thread."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "threads": (torch.get_num_threads(), in_a_thread(torch.get_num_threads)),
        "interop threads": torch.get_num_interop_threads(),
        "torch's random numbers": torch.get_rng_state().tolist(),
        "NumPy's": [str(part) for part in np.random.get_state()],
        "Python's": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "cudnn": (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        "matmul": (torch.get_float32_matmul_precision(), matmul.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "NumPy's errors": np.geterr(),
        "printing": np.get_printoptions(),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "environment": dict(os.environ),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "folder": Path.cwd(),
        "path": list(sys.path),
        "streams": (sys.stdin, sys.stdout, sys.stderr),
        "hooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "faults": faulthandler.is_enabled(),
        "warnings": list(warnings.filters),
        "garbage": (gc.isenabled(), gc.get_threshold()),
        "log": (logging.getLogger().level, list(logging.getLogger().handlers)),
        "switches": (sys.getswitchinterval(), sys.getrecursionlimit()),
    }


def settings_without_a_run() -> dict[str, Any]:
    """Returns further settings of the process, which may differ while a run lasts."""
    logs = {name: logging.getLogger(name) for name in ("torchbeast", "ray")}
    logged = {name: (log.level, log.propagate, [*log.handlers]) for name, log in logs.items()}
    descriptors = {
        name: os.readlink(f"/proc/self/fd/{name}")
        for name in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{name}")
    }
    threads = [thread.name for thread in threading.enumerate()]
    return {**settings(), "logs": logged, "descriptors": descriptors, "all threads": threads}


def in_a_thread(function: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@contextlib.contextmanager
def unchanged(read: Callable[[], dict[str, Any]]) -> Iterator[None]:
    before, frozen = read(), gc.get_freeze_count()
    yield
    after = read()
    assert gc.get_freeze_count() <= frozen  # the tests' own frozen objects may be freed
    opened = after.pop("descriptors", {}).items() - before.pop("descriptors", {}).items()
    assert not opened  # of earlier tests, gRPC may close some meanwhile
    started = {*after.pop("all threads", ())} - {*before.pop("all threads", ())}
    assert not started  # executors of earlier tests may end meanwhile
    for name, value in before.items():
        assert after[name] == value, name


@pytest.mark.parametrize("make_scheme", [scheme_of, off_policy_of], ids=["ppo", "dqn"])
def test_whatever_a_learner_does_the_process_is_as_before(make_scheme: Any, tmp_path: Path) -> None:
    scheme = make_scheme()
    with unchanged(settings_without_a_run):
        with unchanged(settings):
            learner = Learner(scheme, 10**6, tmp_path / "run", seed=1)
        for use in (learner.step, learner.step, learner.evaluate, learner.save_model):
            with unchanged(settings):
                use()
        with unchanged(settings):
            learner.restore()
        with unchanged(settings):
            learner.close()


@contextlib.contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    assert torch.get_default_dtype() is torch.float64
    torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def unusual() -> Iterator[None]:
    with (
        float64(),
        torch.device("meta"),
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        np.errstate(all="raise"),
        torch.autograd.set_detect_anomaly(True),
    ):
        yield


def learnt(scheme: Scheme, folder: Path) -> dict[str, Any]:
    """The weights after a short run, with an evaluation in it and a resumption."""
    with Learner(scheme, 10**6, folder, seed=1) as learner:
        for _ in range(3):
            learner.step()
        learner.evaluate(1, seed=2)
        learner.restore(learner.save_model(folder / "saved.tar"))
        learner.step()
        return {name: weights.tolist() for name, weights in learner.actor.state_dict().items()}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("make_scheme", [scheme_of, later(off_policy_of)], ids=["ppo", "dqn"])
def test_a_run_does_not_depend_on_settings_of_its_caller(make_scheme: Any, tmp_path: Path) -> None:
    expected = learnt(make_scheme(), tmp_path / "usual")
    for setting in (unusual, torch.inference_mode):
        with setting():
            found = learnt(make_scheme(), tmp_path / setting.__name__)
        assert found == expected, setting


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_a_step_that_waits_says_for_what_and_can_be_interrupted(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    has_said = threading.Event()

    def warn(sentence: str, is_logged: bool) -> None:
        said.append(sentence)
        if is_interrupted and not has_said.is_set():
            _thread.interrupt_main()
        has_said.set()

    def envs(env: str, num_envs: int) -> Any:
        made = make(env, num_envs)
        take_step = made.step

        def step(action: Any) -> Any:
            assert has_said.wait(10)
            return take_step(action)

        monkeypatch.setattr(made, "step", step)
        return made

    monkeypatch.setattr(waiting, "WAIT_S", 0.0)
    monkeypatch.setattr(watch, "_LOOK_S", 0.001)
    monkeypatch.setattr(watch, "warn", warn)
    monkeypatch.setattr(local_source, "WAIT_S", 0.0)
    scheme = scheme_of({"env_fn": envs, "env_kwargs": {"env": "Catch"}, "vec_env_size": 2})
    with Learner(scheme, 10**6, tmp_path / "run") as learner:
        with pytest.raises(KeyboardInterrupt) if is_interrupted else contextlib.nullcontext():
            learner.step()
    assert said[0].startswith("no update for 0 s: 0 of 2 rollouts of a batch are ready: ")


def made_by_a_module_that_sets_float64(env: str, num_envs: int) -> Any:
    torch.set_default_dtype(torch.float64)
    return make(env, num_envs)


def test_a_module_of_the_user_that_sets_float64_changes_no_worker(tmp_path: Path) -> None:
    envs = {
        "env_fn": made_by_a_module_that_sets_float64,
        "env_kwargs": {"env": "Catch"},
        "vec_env_size": 2,
    }
    scheme = scheme_of(envs, col_remote_workers=1)
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        learner.step()
        weights = learner.actor.named_parameters()
        assert {parameter.dtype for _, parameter in weights} == {torch.float32}
