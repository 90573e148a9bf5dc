# SPDX-License-Identifier: Apache-2.0
"""The workers of a scheme may be Ray's actors."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import psutil
import pytest
import torch
from background import wait_for
from later import later
from ray_clusters import VARIABLES, callers_ray
from small_schemes import impala_of, off_policy_of, scheme_of

from torchbeast import Learner, UsageError
from torchbeast.collect import source
from torchbeast.core.algos import IMPALA
from torchbeast.core.storages import OnPolicyBuffer
from torchbeast.envs.spec import EnvSpec
from torchbeast.fleets import waiting
from torchbeast.gradients import workers
from torchbeast.learner import plan
from torchbeast.reporting.log_files import read_logs
from torchbeast.run import watch

ray = pytest.importorskip("ray")

CPUS = 8
REPLACED_S = 120.0  # another process has to start and to import torch


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets later tests of this process start a Ray without a token: it is asked for or not once."""
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["own", "built-in", "schedule", "environment"])
def test_the_folder_of_own_code_is_copied_to_a_cluster(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.advantage_actor_critic import AdvantageActorCritic

    given: list[bool] = []

    class Fleet:
        def __init__(self, config: Any, name: str, own_code: bool, *_: Any) -> None:
            given.append(own_code)

        def room(self) -> None:
            pass

    monkeypatch.setattr("torchbeast.on_ray.fleet.RayFleet", Fleet)
    monkeypatch.setattr(plan, "check_room", lambda *_: None)
    schedule = "math:sqrt" if name == "schedule" else "constant"
    algo = IMPALA.create_factory(learning_rate_schedule=schedule)
    if name == "own":
        algo = AdvantageActorCritic.create_factory()
    axes: dict[str, Any] = {"col_remote_workers": 1, "col_backend": "ray"}
    scheme = scheme_of(algo=algo, storage=OnPolicyBuffer.create_factory(size=10), **axes)
    spec = EnvSpec("my_module:Mine-v0") if name == "environment" else plan._env_spec(scheme)
    plan._ray_fleet(scheme, spec, scheme.ray)
    assert given == [name != "built-in"]


def local_function() -> Any:
    """Returns a function that makes an environment and cannot be imported, as in a notebook."""

    class Telling(gymnasium.Wrapper):  # type: ignore[type-arg]
        def step(self, action: Any) -> Any:
            *others, info = self.env.step(action)
            return *others, {**info, "seven": 7.0}

    return lambda: Telling(gymnasium.make("CartPole-v1"))


def collecting_here(**axes: Any) -> Any:
    """Returns a scheme that collects without Ray."""
    return impala_of(envs={"env_fn": local_function(), "vec_env_size": 2}, **axes)


def ray_scheme(make: Any = impala_of, **axes: Any) -> Any:
    return make(
        envs={"env_fn": local_function(), "vec_env_size": 2, "info_keywords": ["seven"]},
        col_remote_workers=2,
        col_communication="asynchronous",
        col_backend="ray",
        col_worker_resources={"num_cpus": 0.5},
        **axes,
    )


def what_ray_changes() -> dict[str, Any]:
    """Returns the settings of this process that Ray, and a run on Ray, change."""
    logs = [logging.getLogger(name) for name in ("ray", "torchbeast")]
    return {
        "variables": dict(os.environ),
        "faults": faulthandler.is_enabled(),
        "logs": [(log.level, log.propagate, [*log.handlers]) for log in logs],
        "printing": ray._private.worker.print_to_stdstream,
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "hooks": (sys.excepthook, threading.excepthook),
    }


@pytest.fixture
def without_faulthandler() -> Iterator[None]:
    faulthandler.disable()  # pytest's
    yield
    faulthandler.enable()


@pytest.mark.usefixtures("without_faulthandler")
@pytest.mark.parametrize("make", [impala_of, later(off_policy_of)])
def test_ray_is_started_for_the_run_and_reserves_what_is_asked_for(
    make: Any, tmp_path: Path
) -> None:
    process = what_ray_changes()
    with Learner(ray_scheme(make), 10**6, tmp_path / "run", seed=1) as learner:
        before = {key: value.clone() for key, value in learner.actor.state_dict().items()}
        for _ in range(3):
            learner.step()
        has = ray.cluster_resources()["CPU"]
        assert ray.available_resources()["CPU"] == has - 2 * 0.5
        after = learner.actor.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in before)
    rows = list(read_logs(tmp_path / "run"))
    ended = [row for row in rows if "mean_episode_return" in row]
    assert all(row.get("info_seven") == (7.0 if row in ended else None) for row in rows)
    assert not ray.is_initialized() and what_ray_changes() == process


@pytest.fixture(scope="module")
def initialised() -> Iterator[None]:
    """A Ray of the caller, with a GPU that there is not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES")  # Ray serves no GPUs that it hides
        with callers_ray(num_cpus=CPUS, num_gpus=1):
            yield


def reserved() -> tuple[float, float]:
    """Returns the CPUs and GPUs that are in use."""
    free = ray.available_resources()
    return CPUS - free.get("CPU", 0.0), 1 - free.get("GPU", 0.0)


HALF_A_GPU = {"num_cpus": 2, "num_gpus": 0.5}


@pytest.mark.long
@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize(
    ("make", "axes", "expected"),
    [
        pytest.param(collecting_here, {"grad_worker_resources": HALF_A_GPU}, (4, 1), id="central"),
        pytest.param(
            collecting_here, {"update_execution": "decentralised"}, (2, 0), id="decentral"
        ),
        pytest.param(collecting_here, {"grad_communication": "asynchronous"}, (2, 0), id="free"),
        pytest.param(ray_scheme, {}, (2 + 4 * 0.5, 0), id="collecting on Ray too"),
    ],
)
def test_gradient_workers_on_the_callers_ray_learn_with_what_they_reserve_and_leave_nothing(
    make: Any, axes: dict[str, Any], expected: tuple[float, float], tmp_path: Path
) -> None:
    scheme = make(grad_backend="ray", grad_remote_workers=2, **axes)
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        before = {key: value.clone() for key, value in learner.actor.state_dict().items()}
        for _ in range(3):
            learner.step()
        assert reserved() == expected
        after = learner.actor.state_dict()
    assert all(not torch.equal(before[key], after[key]) for key in before)
    wait_for(lambda: reserved() == (0, 0))


@pytest.mark.long
@pytest.mark.usefixtures("initialised")
def test_a_worker_that_collects_for_a_gradient_worker_is_replaced(tmp_path: Path) -> None:
    scheme = ray_scheme(grad_backend="ray", grad_remote_workers=1)
    with Learner(scheme, 10**6, tmp_path / "run") as learner:
        learner.step()
        below = psutil.Process().children(recursive=True)
        next(each for each in below if "TorchBeastRolloutWorker" in each.name()).kill()
        wait_for(lambda: learner.step()["replaced_workers"] == 1, REPLACED_S)
        wait_for(lambda: learner.step()["live_workers"] == 2, REPLACED_S)


@pytest.mark.long
@pytest.mark.usefixtures("initialised")
@pytest.mark.parametrize(
    ("scheme", "named"),
    [
        (lambda: ray_scheme(), "worker 0 has been starting for "),
        (
            lambda: collecting_here(grad_backend="ray", grad_remote_workers=1),
            "gradient worker 0 has been starting (still loading",
        ),
    ],
)
def test_a_step_that_waits_for_room_says_so_and_goes_on_when_there_is_some(
    scheme: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ray.remote(num_cpus=CPUS)(threading.Event).remote()
    ray.get(others.is_set.remote())
    said: list[str] = []

    def warn(sentence: str, is_logged: bool) -> None:
        if named in sentence and not said:
            said.append(sentence)
            ray.kill(others)

    for module in (waiting, source, workers):
        monkeypatch.setattr(module, "WAIT_S", 0.0)
    monkeypatch.setattr(waiting, "STALL_S", 0.0)
    monkeypatch.setattr(watch, "_LOOK_S", 0.01)
    monkeypatch.setattr(watch, "warn", warn)
    with Learner(scheme(), 10**6, tmp_path / "run") as learner:
        learner.step()
    assert len(said) == 1


@pytest.mark.long
@pytest.mark.usefixtures("initialised")
def test_workers_without_room_are_told_at_once_what_there_is(tmp_path: Path) -> None:
    scheme = collecting_here(
        grad_backend="ray", grad_remote_workers=3, grad_worker_resources={"num_cpus": 4}
    )
    with pytest.raises(UsageError, match="3 gradient workers with 4 CPUs each do not fit on 1 n"):
        Learner(scheme, 10**6, tmp_path / "run")
