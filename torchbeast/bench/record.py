# SPDX-License-Identifier: Apache-2.0
"""Writes measurements as JSON: machine, versions, settings, and every figure."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchbeast.errors import UsageError
from torchbeast.processes.cores import available_cores


def check(path: Path) -> None:
    """Raises UsageError when the file cannot be written; called before measuring."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--json {path} cannot be written: give a file in a folder that exists")


def write_json(path: Path, settings: Mapping[str, object], **figures: object) -> None:
    """Writes the record; NaN and infinity become null."""
    record = {
        "machine": machine(),
        "torch": torch.__version__,
        "settings": {key: str(value) for key, value in settings.items()},
        **figures,
    }
    try:
        path.write_text(json.dumps(_without_nan(record), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--json {path} cannot be written: {error}") from None


def machine() -> str:
    """Describes the processor, the number of cores this process may use, and the GPU."""
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{_processor()}, {available_cores()} cores{gpu}"


def _processor() -> str:
    """Returns the processor's model name where the kernel reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
