# SPDX-License-Identifier: Apache-2.0
"""How the learner uses the machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchbeast.core.actors.networks import AtariNet
from torchbeast.core.envs.spaces import ArraySpec, Discrete
from torchbeast.runtime import compute
from torchbeast.runtime.compute import choose, share_cores
from torchbeast.runtime.flags import ActorFlags, LearningFlags, MachineFlags, MonoBeastFlags

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def chosen(fixed_lag: int | None = None, **machine: Any) -> compute.Compute:
    actors = ActorFlags(fixed_lag=fixed_lag)
    return choose(MonoBeastFlags(machine=MachineFlags(**machine), actors=actors))


@pytest.mark.usefixtures("a_gpu")
def test_one_gpu_is_enough_and_learns_whole_batches_in_bfloat16() -> None:
    found = chosen(torch_threads=2)
    assert (found.device, found.dtype, found.bytes_at_once) == (GPU, torch.bfloat16, None)
    assert str(found) == (
        "Computing on cuda:0 in bfloat16 (this hardware has bfloat16), whole batches at once, "
        "with 2 threads."
    )


@pytest.mark.usefixtures("a_gpu")
def test_a_gpu_that_is_not_wanted_is_not_used() -> None:
    assert chosen(disable_cuda=True).device == CPU


def test_a_cpu_learns_what_fits_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("torchbeast.core.precision._cpu_flags", lambda: {"avx512f"})
    found = chosen(torch_threads=1)
    assert (found.device, found.dtype) == (CPU, torch.float32)
    assert str(found) == (
        "Computing on the CPU in float32 (this hardware does not have bfloat16), 2.7 MB of "
        "observations at once, with 1 thread."
    )


@pytest.mark.parametrize(("megabytes", "expected"), [(0, None), (0.5, 500_000)])
def test_the_flag_says_how_much_is_learnt_at_once(megabytes: float, expected: int | None) -> None:
    assert chosen(megabytes_at_once=megabytes).bytes_at_once == expected


def test_with_a_fixed_lag_threads_and_precision_do_not_depend_on_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchbeast.runtime.flags.available_cores", lambda: 7)
    monkeypatch.setattr("torchbeast.core.precision._cpu_flags", lambda: {"amx_bf16"})
    free, fixed = chosen(), chosen(fixed_lag=1)
    assert (free.threads, free.dtype) == (7, torch.bfloat16)
    assert (fixed.threads, fixed.dtype) == (1, torch.float32)
    given = chosen(fixed_lag=1, torch_threads=3, precision="bfloat16")
    assert (given.threads, given.dtype) == (3, torch.bfloat16)


@pytest.fixture
def torch_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


FRAMES = ArraySpec((4, 84, 84), "uint8")


@pytest.mark.usefixtures("torch_threads")
@pytest.mark.parametrize(
    ("settings", "batch_size", "use_lstm", "expected"),
    [
        ({}, 8, False, (3, 1)),
        ({"compile": True}, 8, False, (1, 3)),
        ({"megabytes_at_once": 0}, 8, False, (1, 3)),
        ({}, 1, False, (1, 3)),
        ({}, 17, True, (1, 3)),  # its pieces have nine columns at least
        ({}, 18, True, (3, 1)),
    ],
)
def test_threads_are_over_pieces_or_inside_of_operations_never_both(
    settings: dict[str, Any], batch_size: int, use_lstm: bool, expected: tuple[int, int]
) -> None:
    flags = MonoBeastFlags(
        machine=MachineFlags(torch_threads=3, disable_cuda=True, **settings),
        learning=LearningFlags(batch_size=batch_size),
    )
    model = AtariNet(FRAMES, Discrete(6), use_lstm)
    assert (share_cores(choose(flags), flags, model), torch.get_num_threads()) == expected
