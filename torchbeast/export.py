# SPDX-License-Identifier: Apache-2.0
"""Exports the agent of a run to a file that runs without TorchBeast.

python -m torchbeast.export ~/logs/torchbeast/latest policy.onnx
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro

from torchbeast.cli.command_line import main as run_program
from torchbeast.core.base.specs import Precision
from torchbeast.envs.spec import EnvSpec
from torchbeast.errors import EXIT_DONE

PROGRAM = "export"


@dataclass(frozen=True, kw_only=True)
class ExportFlags:
    """Exports the agent of a run to a file that runs without TorchBeast."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name or folder of a run, whose newest checkpoint is used, a checkpoint, or zoo:PRESET."""
    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The file to write: policy.pt2 for torch.export, policy.onnx for ONNX."""
    precision: Precision = "float32"
    """Precision of the network's features in a .pt2 file; auto: bfloat16 if this machine supports
    it. An .onnx file always uses float32."""
    env: str = ""
    """Environment of the run. Only needed for your own package.module:factory with keyword
    arguments."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor as JSON. Default: the run's."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code."""
    return run_program(ExportFlags, PROGRAM, argv, run)


def run(flags: ExportFlags) -> int:
    """Exports and verifies the agent."""
    from torchbeast.evaluation.exporting import NUM_STEPS, export
    from torchbeast.fleets.child_process import show_output

    show_output()
    env = EnvSpec(flags.env, flags.env_kwargs)
    written = export(flags.run, flags.file, env, flags.precision)
    print(f"Verified: {written} matches the agent over {NUM_STEPS} environment steps")
    return EXIT_DONE


class _Program(ModuleType):
    """Importing this module gives it the name of the function `torchbeast.export`, so it is one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Path:
        from torchbeast.evaluation.exporting import export

        return export(*args, **kwargs)


sys.modules[__name__].__class__ = _Program

if __name__ == "__main__":
    sys.exit(main())
