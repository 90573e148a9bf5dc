# SPDX-License-Identifier: Apache-2.0
"""Errors in making an environment."""

from __future__ import annotations


class EnvError(ValueError):
    """An environment that cannot be made; the message is one sentence for the user."""
