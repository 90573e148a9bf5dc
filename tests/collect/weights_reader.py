# SPDX-License-Identifier: Apache-2.0
"""A process that reads weights that a test publishes: `weights_reader.py DESCRIPTOR SIZE`."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from torchbeast.collect.weights import SharedWeights


def model() -> nn.Module:
    """2 MB in tensors of several shapes."""
    return nn.Sequential(nn.Linear(700, 700), nn.BatchNorm1d(64), nn.Linear(5, 1), nn.PReLU())


def values(of: nn.Module) -> set[float]:
    """Returns the distinct values of the weights."""
    return {value for t in of.state_dict().values() for value in t.unique().tolist()}


def hold(weights: SharedWeights) -> None:
    """Reads the newest version, with a pause until its input ends; prints what it has read."""
    replica = model()
    load = replica.load_state_dict

    def load_later(state: Any) -> None:
        print("held", flush=True)
        sys.stdin.read()
        load(state)

    replica.load_state_dict = load_later
    weights.refresh(replica, held=None)
    print(values(replica), flush=True)


if __name__ == "__main__":
    opened = SharedWeights(model(), size=int(sys.argv[2]), descriptor=int(sys.argv[1]))
    hold(opened)
