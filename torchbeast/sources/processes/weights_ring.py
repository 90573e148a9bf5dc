# SPDX-License-Identifier: Apache-2.0
"""Opens the learner's shared memory of weights in workers on its machine, which it did not start.

    learner  SharedWeights, an anonymous file -- RingAddress, an argument of `start` --> worker

A worker is no child of the learner, so it inherits no descriptor. It opens the learner's through
/proc, and falls back to weights that are sent where it cannot: on other nodes, on systems without
/proc, in containers that see other processes, as another user.
"""

from __future__ import annotations

import os
import weakref
from typing import NamedTuple

from torch import nn

from torchbeast.sources.processes.shared_weights import SharedWeights


class RingAddress(NamedTuple):
    """The file of a ring of weights, as other processes of its node find it.

    Device and inode tell whether the path leads to this file: in a container the same numbers may
    be those of another process.
    """

    node: str  # id
    path: str
    device: int
    inode: int
    size: int  # of the ring: number of versions


def address_of(ring: SharedWeights, node: str) -> RingAddress | None:
    """Returns the address of this process's ring; None for a learner outside the cluster.

    node: the id of the node that this process runs on; "" outside the cluster.
    """
    if not node:
        return None
    file = os.fstat(ring.descriptor)
    path = f"/proc/{os.getpid()}/fd/{ring.descriptor}"
    return RingAddress(node, path, file.st_dev, file.st_ino, ring.size)


def opened(address: RingAddress | None, model: nn.Module) -> SharedWeights | None:
    """Opens the ring, which holds weights of this model; None where it cannot be reached."""
    if address is None:
        return None
    try:
        return _opened(address, model)
    except (OSError, ValueError):  # no such process, not permitted, a file of another size
        return None


def _opened(address: RingAddress, model: nn.Module) -> SharedWeights | None:
    file = os.stat(address.path)  # first: to open anything but a file may block
    if (file.st_dev, file.st_ino) != (address.device, address.inode):
        return None
    descriptor = os.open(address.path, os.O_RDWR)
    try:
        ring = SharedWeights(model, size=address.size, descriptor=descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    weakref.finalize(ring, os.close, descriptor)
    return ring
