# SPDX-License-Identifier: Apache-2.0
"""Which numbers networks are computed in.

Features, the expensive part, may be bfloat16 where the hardware multiplies it: Intel's AMX and
AVX512-BF16, ARM's BF16, a GPU's tensor cores. Elsewhere it is emulated and slower than float32.
Weights, recurrent cores, policies, values, V-trace, losses and the optimiser are float32 always.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import torch

Precision = Literal["auto", "float32", "bfloat16"]

# What the kernel calls these instructions on x86 and ARM.
_CPU_FLAGS = {"amx_bf16", "avx512_bf16", "bf16"}
_TENSOR_CORES_WITH_BFLOAT16 = (8, 0)  # compute capability: Ampere
_CPU_INFO = Path("/proc/cpuinfo")


def dtype_for(precision: Precision, device: torch.device) -> torch.dtype:
    """The wanted dtype; for "auto" bfloat16 where the device multiplies it, else float32."""
    if precision == "auto":
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware itself multiplies bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= _TENSOR_CORES_WITH_BFLOAT16
    return device.type == "cpu" and not _CPU_FLAGS.isdisjoint(_cpu_flags())


def computing_in(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Convolutions and matrix products in it have this dtype, whatever that of their inputs.

    Without autocast's cache of weights, which all threads share: one that records no graph would
    leave a weight there that takes no gradient in another.
    """
    is_needed = dtype != torch.float32
    return torch.autocast(device.type, dtype, enabled=is_needed, cache_enabled=False)


def _cpu_flags() -> set[str]:
    """The instructions that the first core has; none known where the kernel does not tell."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    flags = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "feat")))
    return set(next(flags, "").split())
