# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: interleaved runs, and their figures as a table and as JSON."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from torchbeast.errors import UsageError
from torchbeast.fleets.system import available_cores

Figures = dict[str, list[float]]  # name -> one figure per run
T = TypeVar("T")


def interleaved(runs: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Runs each function `repeats` times, A B A B, so that a disturbance affects all runs alike.

    Returns the results by name; prints a dot on stderr for each run.
    """
    figures: dict[str, list[T]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            figures[name].append(run())
            print(".", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return figures


def print_table(figures: Figures, unit: str) -> None:
    """Prints medians, their ratio to the first median, and every figure."""
    first = statistics.median(next(iter(figures.values())))
    print(f"| run | {unit}, median | to the first | all |")
    print("| --- | --- | --- | --- |")
    for name, values in figures.items():
        median = statistics.median(values)
        every = ", ".join(f"{value:,.0f}" for value in values)
        print(f"| {name} | {median:,.0f} | {median / first:.2f} | {every} |")


def write_json(path: Path | None, arguments: argparse.Namespace, **figures: object) -> None:
    """Writes machine, versions, settings and figures; a no-op without a path."""
    if path is not None:
        write_record(path, vars(arguments), **figures)


def check_json(path: Path) -> None:
    """Raises UsageError when the file cannot be written; called before measuring."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--json {path} cannot be written: use a file in a folder that exists")


def write_record(path: Path, settings: Mapping[str, object], **figures: object) -> None:
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


# Linux's names of the instructions that matter most for speed.
_INSTRUCTIONS = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "bfloat16", "amx_bf16": "AMX"}


def _processor() -> str:
    """Returns the processor's model name and instructions where the kernel reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    info = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    has = [name for flag, name in _INSTRUCTIONS.items() if flag in info.get("flags", "").split()]
    return ", ".join([info.get("model name", platform.processor() or platform.machine()), *has])


def _without_nan(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def bare_grpc(
    program: Path, message_bytes: int, num_servers: int, num_streams: int
) -> Iterator[Callable[[float], float]]:
    """Yields the measurement of gRPC alone, in messages/s over some seconds.

    program: built from bare_grpc.cc. Its servers live as long as the context.
    """
    with tempfile.TemporaryDirectory(prefix="torchbeast-") as folder, ExitStack() as opened:
        addresses = [f"unix:{folder}/{i}" for i in range(num_servers)]
        for address in addresses:
            command = [str(program), "serve", address, str(message_bytes)]
            server = opened.enter_context(subprocess.Popen(command))
            opened.callback(server.kill)

        def measure(seconds: float) -> float:
            command = [str(program), "measure", str(seconds), str(num_streams), *addresses]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            return float(found.stdout)

        yield measure
