# SPDX-License-Identifier: Apache-2.0
"""An agent's side of a shared replay, the same for every transport.

An agent copies columns of its batches to a batch of its own that it sends, and columns from one
that it gets.
"""

from __future__ import annotations

import numpy as np

from torchbeast.core.nest_py import map_leaves2
from torchbeast.core.storages.rollout_store import Facts
from torchbeast.sources.replay import Arrays
from torchbeast.sources.sharing.joining import Joining
from torchbeast.sources.sharing.shared_replay import Figures


class SharingAgent:
    """What an agent knows of the replay: as it joined, and as the last answer said."""

    _joining: Joining
    _figures: Figures

    @property
    def capacity(self) -> int:
        """The number of transitions for which there is room."""
        return self._joining.capacity

    @property
    def size(self) -> int:
        """The number of stored transitions, when the replay was last used."""
        return self._figures.size

    @property
    def episodes(self) -> int:
        """The number of episodes that could be sampled, when the replay was last used."""
        return self._figures.episodes

    def facts(self) -> Facts:
        """Returns the figures of the replay, of all agents together, when it was last used."""
        return Facts(self._figures.fill, self._figures.samples_per_insert)


def take_columns(arrays: Arrays, columns: slice, batch: Arrays) -> None:
    """Copies columns of arrays [T+1, B, ...] to all of a batch, which decides the fields."""
    for name, nest in batch.items():
        map_leaves2(lambda to, leaf: np.copyto(to, leaf[:, columns]), nest, arrays[name])


def put_columns(batch: Arrays, arrays: Arrays, columns: slice) -> None:
    """Copies all of a batch to columns of arrays [T+1, B, ...]."""
    for name, nest in batch.items():
        map_leaves2(lambda leaf, from_: np.copyto(leaf[:, columns], from_), arrays[name], nest)
