# SPDX-License-Identifier: Apache-2.0
"""Errors in making an environment."""

from __future__ import annotations

from torchbeast.errors import UsageError


class EnvError(UsageError):
    """An environment that cannot be made."""
