# SPDX-License-Identifier: Apache-2.0
"""Floating-point precision of the networks.

Features, the expensive part, may be computed in bfloat16 where the hardware supports it: Intel's
AMX and AVX512-BF16, ARM's BF16, a GPU's tensor cores. Elsewhere bfloat16 is emulated and slower
than float32. Weights, recurrent cores, policies, values, V-trace, losses and the optimiser are
always float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import torch

from torchbeast.core.choices import Precision

# Linux's names of these instructions on x86 and ARM.
_CPU_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
_TENSOR_CORES_WITH_BFLOAT16 = (8, 0)  # compute capability: Ampere
_CPU_INFO = Path("/proc/cpuinfo")


def dtype_for(precision: Precision, device: torch.device) -> torch.dtype:
    """Returns the dtype of features; "auto" is bfloat16 where the hardware supports it."""
    if precision == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def has_bfloat16(device: torch.device) -> bool:
    """Returns whether the device multiplies bfloat16 in hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _TENSOR_CORES_WITH_BFLOAT16
    return device.type == "cpu" and not _CPU_FLAGS.isdisjoint(_cpu_flags())


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Returns a context in which convolutions and matrix products are computed in `dtype`.

    Autocast's weight cache is off because all threads share it: a thread that records no graph
    would leave a weight there that receives no gradient in another thread.
    """
    is_needed = dtype != torch.float32
    return torch.autocast(device.type, dtype, enabled=is_needed, cache_enabled=False)


def _cpu_flags() -> set[str]:
    """Returns the instruction sets of the first core; empty where the system does not list them."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    flags = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "feat")))
    return set(next(flags, "").split())
