# SPDX-License-Identifier: Apache-2.0
"""Schemes: how the work on an agent is spread; workers on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.schemes.scheme import Scheme as Scheme

__all__ = ["Scheme"]

__getattr__ = importing(__name__, {"Scheme": "scheme"})
