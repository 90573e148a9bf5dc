# SPDX-License-Identifier: Apache-2.0
"""A GPU learns what the CPU learns; without a GPU these tests are skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_schemes import impala_of, off_policy_of, scheme_of

from torchbeast import Learner, load_agent, make_env
from torchbeast.core.algos import LASER, PPO
from torchbeast.core.storages import OnPolicyVTraceBuffer
from torchbeast.schemes import Scheme

pytestmark = pytest.mark.skipif("not torch.cuda.is_available()", reason="PyTorch finds no GPU")

# One worker that waits for the weights: such runs compute in float32 on every device.
SYNCHRONOUS = {"col_remote_workers": 1, "col_communication": "synchronous"}


def laser_of(**axes: Any) -> Scheme:
    storage = OnPolicyVTraceBuffer.create_factory(size=10, replay_size=200, replay_ratio=1.0)
    return scheme_of(algo=LASER.create_factory(), storage=storage, **axes)


def ppo_of(**axes: Any) -> Scheme:
    """Learns three times from whole batches: a device shuffles the rows in its own order."""
    return scheme_of(algo=PPO.create_factory(num_epochs=3, num_mini_batch=1), **axes)


def trained(make: Callable[..., Scheme], device: str, folder: Path, **axes: Any) -> Learner:
    """Returns a learner after its first update on the device."""
    learner = Learner(make(local_device=device, **SYNCHRONOUS, **axes), 10**6, folder, seed=1)
    learner.step()
    assert {tensor.device.type for tensor in learner.actor.state_dict().values()} == {device}
    return learner


@pytest.mark.parametrize(
    ("make", "axes"),
    [
        (impala_of, {}),
        (impala_of, {"recurrent": True}),
        (laser_of, {}),
        (ppo_of, {}),
        (ppo_of, {"recurrent": True}),
        (off_policy_of, {}),
    ],
)
def test_the_first_update_changes_the_weights_as_on_the_cpu(
    make: Callable[..., Scheme], axes: dict[str, Any], tmp_path: Path
) -> None:
    found = {}
    for device in ("cpu", "cuda"):
        with trained(make, device, tmp_path / device, **axes) as learner:
            found[device] = {
                name: tensor.cpu().clone() for name, tensor in learner.actor.state_dict().items()
            }
    for name, tensor in found["cpu"].items():
        torch.testing.assert_close(found["cuda"][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "axes",
    [
        {"grad_communication": "synchronous"},
        {"grad_communication": "asynchronous"},
        {"update_execution": "decentralised"},
    ],
)
def test_gradients_of_workers_on_the_cpu_change_weights_on_a_gpu(
    axes: dict[str, Any], tmp_path: Path
) -> None:
    """The observations of CartPole are normalised, so their statistics are joined too."""
    envs = {"env_fn": make_env, "env_kwargs": {"env": "CartPole-v1"}, "vec_env_size": 2}
    scheme = scheme_of(envs, local_device="cuda", grad_remote_workers=2, **axes)
    with Learner(scheme, 10**6, tmp_path / "run", seed=1) as learner:
        before = {name: tensor.clone() for name, tensor in learner.actor.state_dict().items()}
        learner.step()
        learner.save_model()  # copies the state of decentralised workers
        after = learner.actor.state_dict()
    assert all(tensor.is_cuda for tensor in after.values())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_central_inference_on_a_gpu_learns(tmp_path: Path) -> None:
    pytest.importorskip("libtorchbeast", exc_type=ImportError)
    axes = {"col_remote_workers": 2, "col_communication": "asynchronous", "inference": "central"}
    with Learner(impala_of(local_device="cuda", **axes), 400, tmp_path / "run") as learner:
        assert learner.train()["step"] >= 400


def test_an_agent_of_a_gpu_plays_on_the_cpu_as_it_did_there(tmp_path: Path) -> None:
    with trained(impala_of, "cuda", tmp_path / "run") as learner:
        learner.save_model()
        on_gpu = {name: tensor.cpu() for name, tensor in learner.actor.state_dict().items()}
    loaded = load_agent(tmp_path / "run").agent.model.state_dict()
    assert all(tensor.device.type == "cpu" for tensor in loaded.values())
    assert all(tensor.equal(on_gpu[name]) for name, tensor in loaded.items())
