# SPDX-License-Identifier: Apache-2.0
"""Writes gpu.md and gpu.json from the results that scripts/gpu.sh left in a folder.

usage: python benchmarks/gpu_page.py FOLDER
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import torch
from figures import machine

STAGES = ("environment", "transport", "inference", "learner", "PolyBeast")


def main(folder: Path) -> None:
    parts = [line.split() for line in (folder / "parts").read_text().splitlines()]
    found = {
        "machine": machine(),
        "versions": versions(),
        "parts": {
            name: {
                "exit_code": int(code),
                "seconds": int(seconds),
                "last_line": _last_line(folder / f"{name}.log"),
            }
            for name, code, seconds in parts
        },
        "benchmarks": {
            path.stem.removeprefix("bench-"): json.loads(path.read_text())
            for path in sorted(folder.glob("bench-*.json"))
        },
    }
    (folder / "gpu.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "gpu.md").write_text(page(found))
    print(page(found))


def versions() -> dict[str, str]:
    """Returns the releases that decide the speed."""
    return {
        "Python": sys.version.split()[0],
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        **{name: importlib.metadata.version(name) for name in ("numpy", "gymnasium", "ale-py")},
    }


def page(found: dict[str, Any]) -> str:
    """Returns the page in Markdown."""
    lines = [
        "# On a GPU",
        "",
        f"{found['machine']}; " + ", ".join(f"{k} {v}" for k, v in found["versions"].items()) + ".",
        "",
        "| steps/s | " + " | ".join(STAGES) + " | limit |",
        "| --- |" + " --- |" * (len(STAGES) + 1),
    ]
    for name, bench in found["benchmarks"].items():
        rates = [bench["stages"].get(stage, {}).get("steps_per_second") for stage in STAGES]
        row = " | ".join("" if rate is None else f"{rate:,.0f}" for rate in rates)
        lines.append(f"| {name} | {row} | {bench['limit']} |")
    lines += ["", "| part | exit code | seconds | last line |", "| --- | --- | --- | --- |"]
    for name, part in found["parts"].items():
        lines.append(f"| {name} | {part['exit_code']} | {part['seconds']} | {part['last_line']} |")
    return "\n".join(lines) + "\n"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "").replace("|", "/")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
