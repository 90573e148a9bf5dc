# SPDX-License-Identifier: Apache-2.0
"""A sum tree: draws entries in proportion to their priorities, in time logarithmic in their number
(Schaul et al. 2016, arXiv 1511.05952, appendix B.2.1).

                 42                 node 1
            /         \\
          29           13           nodes 2, 3: each the sum of its children
        /    \\       /    \\
       13    16      3     10       the entries
"""

from __future__ import annotations

import numpy as np

from torchbeast.core.checks import require


class SumTree:
    """Priorities of `size` entries, all 0 at first. All methods take arrays of any length."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._leaves = 1 << max(0, size - 1).bit_length()
        self._sums = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        """The sum of all priorities."""
        return float(self._sums[1])

    def clear(self) -> None:
        """Sets all priorities to 0."""
        self._sums[:] = 0.0

    def priorities(self, entries: np.ndarray) -> np.ndarray:
        """Returns the priorities of entries; float64 of their shape."""
        found: np.ndarray = self._sums[self._leaves + entries]
        return found

    def set(self, entries: np.ndarray, priorities: np.ndarray | float) -> None:
        """Sets the priorities of entries; the last one counts of an entry that is given twice.

        Raises ValueError unless they are finite and at least 0.
        """
        require(
            bool(np.isfinite(priorities).all() and (np.asarray(priorities) >= 0).all()),
            f"priorities must be finite and at least 0, got {priorities}",
        )
        nodes = self._leaves + entries
        self._sums[nodes] = priorities
        while len(nodes) and nodes[0] > 1:  # all are on one level
            nodes = np.unique(nodes // 2)
            self._sums[nodes] = self._sums[2 * nodes] + self._sums[2 * nodes + 1]

    def find(self, targets: np.ndarray) -> np.ndarray:
        """Returns for each target in [0, total) the entry i for which sum(p[:i]) <= target and
        target < sum(p[:i+1]); int64 of its shape.
        """
        nodes = np.ones(targets.shape, np.int64)
        for _ in range(self._leaves.bit_length() - 1):
            left = self._sums[2 * nodes]
            # A sum that is rounded may send a target beyond the last entry that has a priority.
            goes_right = (targets >= left) & (self._sums[2 * nodes + 1] > 0)
            targets = np.where(goes_right, targets - left, targets)
            nodes = 2 * nodes + goes_right
        entries: np.ndarray = nodes - self._leaves
        return entries


def bytes_per_entry(size: int) -> int:
    """Returns the bytes of memory that each of `size` entries takes, rounded up."""
    return -(-16 * (1 << max(0, size - 1).bit_length()) // size)
