# SPDX-License-Identifier: Apache-2.0
"""Which numbers networks are computed in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from torchbeast.core.actors.networks import DeepNet, MLPNet
from torchbeast.core.actors.off_policy import NETWORKS
from torchbeast.core.base import computing
from torchbeast.core.envs.spaces import ArraySpec, Discrete

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
LARGE = nn.Linear(256, 256)


def cpu_info(flags: str) -> str:
    return f"processor\t: 0\nmodel name\t: A\n{flags}\n\nprocessor\t: 1\n{flags}\n"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_vnni", torch.float32),
        ("flags\t\t: fpu avx512f avx512_bf16", torch.bfloat16),
        ("flags\t\t: fpu amx_bf16 amx_tile", torch.bfloat16),
        ("Features\t: fp asimd bf16", torch.bfloat16),
        ("Features\t: fp asimd", torch.float32),
        ("vmx flags\t: bf16", torch.float32),
        ("", torch.float32),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_it_multiplies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, expected: torch.dtype
) -> None:
    (tmp_path / "cpuinfo").write_text(cpu_info(flags))
    monkeypatch.setattr(computing, "_CPU_INFO", tmp_path / "cpuinfo")
    assert computing.dtype_for("auto", CPU, LARGE.parameters()) == expected


def test_a_system_that_does_not_tell_its_cpu_computes_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computing, "_CPU_INFO", tmp_path / "missing")
    assert computing.dtype_for("auto", CPU, LARGE.parameters()) == torch.float32


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((7, 5), torch.float32), ((8, 0), torch.bfloat16), ((9, 0), torch.bfloat16)],
)
def test_a_gpu_computes_in_bfloat16_where_it_has_tensor_cores_for_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert computing.dtype_for("auto", GPU, LARGE.parameters()) == expected


def test_what_is_asked_for_is_used_whatever_the_hardware() -> None:
    assert computing.dtype_for("float32", GPU, LARGE.parameters()) == torch.float32
    assert computing.dtype_for("bfloat16", CPU, nn.Linear(4, 64).parameters()) == torch.bfloat16


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 64)), torch.float32),
        (nn.Conv2d(4, 16, 3), torch.bfloat16),
        (LARGE, torch.bfloat16),
    ],
)
def test_small_networks_without_convolutions_are_computed_in_float32_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, expected: torch.dtype
) -> None:
    monkeypatch.setattr(computing, "_cpu_flags", lambda: {"avx512_bf16"})
    assert computing.dtype_for("auto", CPU, model.parameters()) == expected
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert computing.dtype_for("auto", GPU, model.parameters()) == torch.bfloat16


@pytest.mark.parametrize("network", ["q-mlp", "sac-mlp"])
def test_without_a_layer_in_bfloat16_a_network_is_said_to_compute_in_float32(
    monkeypatch: pytest.MonkeyPatch, network: str
) -> None:
    monkeypatch.setattr(computing, "_cpu_flags", lambda: {"avx512_bf16"})
    model = NETWORKS[network](ArraySpec((4,), "float32"), Discrete(2), False)
    assert computing.dtype_for("auto", CPU, model.feature_weights()) == torch.float32
    images = NETWORKS[network.replace("mlp", "shallow")](
        ArraySpec((4, 84, 84), "uint8"), Discrete(2), False
    )
    assert computing.dtype_for("auto", CPU, images.feature_weights()) == torch.bfloat16


@pytest.mark.parametrize("shared", [True, False])
def test_a_small_network_stays_small_with_a_recurrent_layer(
    monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(computing, "_cpu_flags", lambda: {"avx512_bf16"})
    model = MLPNet(ArraySpec((4,), "float32"), Discrete(2), True, shared_body=shared)
    model.set_precision("auto", CPU)
    assert model.compute_dtype == torch.float32  # the LSTM never computes in bfloat16


class Own(DeepNet):
    """A user's network, from a module outside TorchBeast."""


def test_a_users_network_computes_in_float32_until_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "_cpu_flags", lambda: {"avx512_bf16"})
    spaces = ArraySpec((4, 84, 84), "uint8"), Discrete(2), False
    for network, expected in ((DeepNet, torch.bfloat16), (Own, torch.float32)):
        model = network(*spaces)
        model.set_precision("auto", CPU)
        assert model.compute_dtype == expected
        model.set_precision("bfloat16", CPU)
        assert model.compute_dtype == torch.bfloat16


def test_what_is_computed_in_float32_stays_so_within_bfloat16() -> None:
    rows = torch.ones(4, 256)
    with computing.computing_in(torch.bfloat16, CPU):
        assert LARGE(rows).dtype == torch.bfloat16
        with computing.computing_in(torch.float32, CPU):
            assert LARGE(rows).dtype == torch.float32
