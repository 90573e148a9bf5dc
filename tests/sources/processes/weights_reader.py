# SPDX-License-Identifier: Apache-2.0
"""A process that reads weights that a test publishes: `weights_reader.py DESCRIPTOR SIZE WHAT`."""

from __future__ import annotations

import fcntl
import sys

import torch
from torch import nn

from torchbeast.sources.processes.shared_weights import SharedWeights


def model() -> nn.Module:
    """2 MB in tensors of several shapes."""
    return nn.Sequential(nn.Linear(700, 700), nn.BatchNorm1d(64), nn.Linear(5, 1), nn.PReLU())


def values(of: nn.Module) -> set[float]:
    """Returns the distinct values of the weights."""
    return {value for t in of.state_dict().values() for value in t.unique().tolist()}


def read_until(weights: SharedWeights, last: int) -> None:
    """Reads newest versions until `last`; prints their number, and those that were torn."""
    replica, held, seen, torn = model(), None, 0, 0
    while held != last:
        before, held = held, weights.refresh(replica, held)
        if held != before:
            seen += 1
            torn += values(replica) != {float(held)}
    print(f"seen {seen} torn {torn}", flush=True)


def hold(weights: SharedWeights) -> None:
    """Locks the place of the newest version like a reader, and never releases it."""
    with weights._locked(weights.version % weights.size, fcntl.LOCK_SH):
        print("held", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    torch.set_num_threads(1)
    opened = SharedWeights(model(), size=int(sys.argv[2]), descriptor=int(sys.argv[1]))
    print("ready", flush=True)
    if sys.argv[3] == "hold":
        hold(opened)
    else:
        read_until(opened, int(sys.argv[3]))
