# SPDX-License-Identifier: Apache-2.0
"""The reports of a run: its folder, logs, display, metrics and diagnosis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.reporting.loggers import CsvLogger as CsvLogger
    from torchbeast.reporting.loggers import Logger as Logger
    from torchbeast.reporting.loggers import StdoutLogger as StdoutLogger
    from torchbeast.reporting.loggers import TensorBoardLogger as TensorBoardLogger
    from torchbeast.reporting.loggers import WandbLogger as WandbLogger

__all__, __getattr__, __dir__ = importing(__name__)
