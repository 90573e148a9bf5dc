# SPDX-License-Identifier: Apache-2.0
"""Schemes: the components of an agent, and how the work of training it is divided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbeast.core.base.lazy import importing

if TYPE_CHECKING:
    from torchbeast.schemes.scheme import Scheme as Scheme

__all__, __getattr__, __dir__ = importing(__name__)
