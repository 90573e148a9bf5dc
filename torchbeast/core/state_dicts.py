# SPDX-License-Identifier: Apache-2.0
"""Saved weights against the module they are to be loaded into."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn


def check_fits(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raises ValueError that names the first tensor in which a state_dict and the module differ."""
    shapes = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: list(tensor.shape) for name, tensor in state.items()}
    for name in [*shapes, *found]:
        if shapes.get(name) != found.get(name):
            raise ValueError(
                f"the checkpoint is another model's: {name} is {found.get(name, 'missing')} in the "
                f"checkpoint and {shapes.get(name, 'missing')} in the model; "
                "use the model, environment and version of torchbeast that it was trained with"
            )
