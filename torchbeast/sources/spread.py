# SPDX-License-Identifier: Apache-2.0
"""Divides environments among processes."""

from __future__ import annotations


def split_evenly(total: int, num_groups: int) -> list[int]:
    """Returns the sizes of `num_groups` groups that sum to `total` and differ by at most one."""
    each, more = divmod(total, num_groups)
    return [each + (i < more) for i in range(num_groups)]
