# SPDX-License-Identifier: Apache-2.0
"""What a run reports: its folder, logs, display and diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.lazy import importing

if TYPE_CHECKING:
    from torchbeast.reporting.log_files import CsvLogger as CsvLogger
    from torchbeast.reporting.log_files import Logger as Logger
    from torchbeast.reporting.stdout import StdoutLogger as StdoutLogger
    from torchbeast.reporting.tensorboard import TensorBoardLogger as TensorBoardLogger
    from torchbeast.reporting.weights_and_biases import WandbLogger as WandbLogger

__all__ = ["CsvLogger", "Logger", "StdoutLogger", "TensorBoardLogger", "WandbLogger"]

_FOUND_IN = {
    "CsvLogger": "log_files",
    "Logger": "logger",
    "StdoutLogger": "stdout",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "weights_and_biases",
}

__getattr__ = importing(__name__, _FOUND_IN)
