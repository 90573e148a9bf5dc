# SPDX-License-Identifier: Apache-2.0
"""Tests of the choice of device, precision, threads and slices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from torchbeast.cli.command_line import parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.weights import PublishedWeights
from torchbeast.core.actors.contract import Agent
from torchbeast.core.actors.registry import make_agent
from torchbeast.core.base.specs import ActorSpec
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.errors import UsageError
from torchbeast.run.assemble import Compute, assemble, choose, share_cores
from torchbeast.run.config import HardwareConfig
from torchbeast.servers.source import inference_threads

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def chosen(reproducible: bool = False, **settings: Any) -> Compute:
    return choose(HardwareConfig(**settings), reproducible)


def computing_in(dtype: torch.dtype) -> Any:
    return Mock(compute_dtype=dtype)


@pytest.mark.usefixtures("a_gpu")
def test_one_gpu_suffices_and_learns_whole_batches_in_bfloat16() -> None:
    found = chosen(torch_threads=2)
    assert (found.device, found.bytes_at_once) == (GPU, None)
    assert found.summary(computing_in(torch.bfloat16)) == "Device: cuda:0, bfloat16, 2 threads"


@pytest.mark.usefixtures("a_gpu")
def test_disable_cuda_selects_the_cpu() -> None:
    assert chosen(disable_cuda=True).device == CPU
    assert chosen(device="cpu").device == CPU


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_is_chosen_by_its_number_and_refused_if_it_is_not_there() -> None:
    assert chosen(device="cuda:1").device == torch.device("cuda:1")
    assert chosen(device="cuda").device == torch.device("cuda:0")
    with pytest.raises(UsageError, match="device cuda:2 does not exist, PyTorch found 2 GPUs"):
        chosen(device="cuda:2")


def test_without_gpus_no_other_number_of_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="PyTorch found 0 GPUs: use device auto$"):
        chosen(device="cuda:0")


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:0,1"])
def test_a_device_of_no_known_form_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda, or the number .*, got"):
        HardwareConfig(device=device)


def test_a_gpu_of_apple_is_refused_with_what_to_use_instead() -> None:
    with pytest.raises(ValueError, match="got 'mps'. Apple's GPUs are not supported: use cpu"):
        HardwareConfig(device="mps")


def test_on_the_cpu_slices_have_2_7_mb_of_observations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = chosen(torch_threads=1)
    assert (found.device, found.bytes_at_once) == (CPU, 96 * 4 * 84 * 84)
    assert found.summary(computing_in(torch.float32)) == "Device: CPU, float32, 1 thread"


@pytest.mark.parametrize(("megabytes", "expected"), [(0, None), (0.5, 500_000)])
def test_megabytes_at_once_sets_the_size_of_a_slice(megabytes: float, expected: int | None) -> None:
    assert chosen(megabytes_at_once=megabytes).bytes_at_once == expected


@pytest.mark.usefixtures("a_gpu")
def test_a_fixed_lag_has_one_learner_thread_on_a_gpu_too() -> None:
    assert chosen().learner_threads == 2
    assert chosen(reproducible=True).learner_threads == 1


def test_a_reproducible_run_has_the_same_threads_and_precision_on_every_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchbeast.run.assemble.available_cores", lambda: 7)
    monkeypatch.setattr("torchbeast.core.base.computing._cpu_flags", lambda: {"amx_bf16"})
    free, fixed = chosen(), chosen(reproducible=True)
    assert (free.threads, free.precision) == (7, "auto")
    assert (fixed.threads, fixed.precision) == (1, "float32")
    given = chosen(reproducible=True, torch_threads=3, precision="bfloat16")
    assert (given.threads, given.precision) == (3, "bfloat16")


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def agent(shape: tuple[int, ...], model: str, use_lstm: bool = False) -> Agent:
    return make_agent(
        ActorSpec(model, use_lstm=use_lstm), ArraySpec(shape, "uint8"), Discrete(6), 1
    )


def shared(batch_size: int, agent: Agent, **settings: Any) -> Any:
    """Returns the threads for slices, and inside operations, with 6 cores; rollouts of 20 steps."""
    compute = chosen(torch_threads=6, **settings)
    return share_cores(compute, batch_size, 20, agent), torch.get_num_threads()


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    ("batch_size", "model", "use_lstm", "expected"),
    [
        (32, "shallow", False, (6, 1)),
        (4, "shallow", False, (2, 3)),  # slices of at least 42 rows
        (1, "shallow", False, (1, 6)),
        (8, "shallow", True, (2, 3)),  # slices of at least four columns
        (17, "shallow", True, (5, 1)),
    ],
)
def test_threads_learn_from_slices_and_the_remaining_cores_serve_their_operations(
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
    model: str,
    use_lstm: bool,
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert shared(batch_size, agent((4, 84, 84), model, use_lstm)) == expected


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    "settings", [{"compile": True}, {"megabytes_at_once": 0}, {"reproducible": True}], ids=str
)
def test_a_batch_that_one_thread_learns_has_all_cores_inside_operations(settings: Any) -> None:
    assert shared(32, agent((4, 84, 84), "shallow"), disable_cuda=True, **settings) == (1, 6)


@pytest.mark.usefixtures("torch_threads")
def test_a_batch_of_small_observations_is_one_slice() -> None:
    assert shared(32, agent((4,), "mlp"), disable_cuda=True) == (1, 6)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    ("given", "shape", "expected"),
    [
        ([], (4,), (1, 1)),
        ([], (4, 84, 84), (6, 1)),
        (["--torch_threads", "3"], (4,), (1, 3)),
        (["--model_kwargs", '{"hidden": 8192}'], (4,), (1, 6)),
    ],
)
def test_a_small_batch_has_one_thread_unless_more_are_given(
    monkeypatch: pytest.MonkeyPatch,
    given: list[str],
    shape: tuple[int, ...],
    expected: tuple[int, int],
) -> None:
    """Threads for slices, and inside operations, with 6 cores; 32 rollouts of 20 steps."""
    monkeypatch.setattr("torchbeast.run.assemble.available_cores", lambda: 6)
    words = ["--batch_size", "32", "--unroll_length", "20", "--disable_cuda", *given]
    config = parse(MonoBeastFlags, "monobeast", words).learner_config("Catch")

    def make(spec: ActorSpec) -> Agent:
        return make_agent(spec, ArraySpec(shape, "uint8"), Discrete(6), 1)

    made = assemble(config, make, PublishedWeights)
    assert (made.optimiser_step._slices._num_threads, torch.get_num_threads()) == expected


@pytest.mark.usefixtures("torch_threads", "a_gpu")
def test_only_one_thread_at_a_time_learns_on_a_gpu() -> None:
    assert shared(32, agent((4, 84, 84), "shallow"), megabytes_at_once=2.7) == (1, 6)


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    ("count", "device", "inside", "expected"),
    [(3, CPU, 1, 3), (None, GPU, 1, 2), (None, CPU, 1, 4), (None, CPU, 4, 1), (None, CPU, 16, 1)],
)
def test_inference_threads_are_as_set_or_chosen_by_the_hardware(
    monkeypatch: pytest.MonkeyPatch,
    count: int | None,
    device: torch.device,
    inside: int,
    expected: int,
) -> None:
    monkeypatch.setattr("torchbeast.servers.source.available_cores", lambda: 16)
    torch.set_num_threads(inside)
    assert inference_threads(count, device) == expected
