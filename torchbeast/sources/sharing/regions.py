# SPDX-License-Identifier: Apache-2.0
"""The memory that an agent shares with the process of a shared replay.

    | inserted [T+1, B, ...]: each field | filled [T+1, S, ...]: each field |

The file is anonymous and cannot be resized, so the kernel frees it however the processes end, and
neither can take memory away under the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from torchbeast.core.nest_py import map_leaves
from torchbeast.sources.shared_memory import SharedFile, arrays_at, slot_size
from torchbeast.sources.sharing.joining import Joining


class Region:
    """Two batches in memory that an agent and the service share.

    inserted, filled: by field of Rollout, nests of arrays [T+1, B, ...] and [T+1, S, ...].
    """

    def __init__(self, joining: Joining, descriptor: int | None = None) -> None:
        """Makes the memory, or maps that behind a descriptor, which may be closed afterwards."""
        inserted, filled = _specs(joining)
        self._file = SharedFile(region_bytes(joining), descriptor)
        self.inserted = arrays_at(inserted, self._file.bytes, 0)
        self.filled = arrays_at(filled, self._file.bytes, slot_size(inserted))

    @property
    def descriptor(self) -> int:
        """The file."""
        return self._file.descriptor

    def taken(self) -> dict[str, Any]:
        """Returns `inserted` with copies of all fields but the observation.

        What is counted is read more than once: the agent must not change it meanwhile. Observations
        may be large, and only their own rows are wrong if it does.
        """
        return {
            name: nest if name == "observation" else map_leaves(np.copy, nest)
            for name, nest in self.inserted.items()
        }


def region_bytes(joining: Joining) -> int:
    """Returns the bytes of the region of an agent."""
    return sum(map(slot_size, _specs(joining)))


def _specs(joining: Joining) -> tuple[dict[str, Any], dict[str, Any]]:
    return joining.batch(joining.columns), joining.batch(joining.spare_columns)
