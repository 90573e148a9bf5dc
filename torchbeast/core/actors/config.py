# SPDX-License-Identifier: Apache-2.0
"""Settings of the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchbeast.core.specs import ActorSpec


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    model: str = "auto"
    """deep (IMPALA ResNet), fixup (the same with Fixup's blocks), shallow (the original's AtariNet,
    3x faster), shallow-norm (AtariNet with standardised images and orthogonal initialisation:
    learns Pong in fewer steps), small (one convolution), mlp, my_module:MyNet; auto: for
    images deep in PolyBeast, as in the original, and shallow elsewhere; small for images below 36
    pixels and maps of names, mlp for vectors. docs/observations.md defines images and maps."""
    use_lstm: bool = False
    """Give the network a recurrent memory: an LSTM, or a GRU with --model_kwargs
    '{"core": "gru"}'. Costs speed; needed where a single observation does not determine the
    state."""
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the network's constructor as JSON. The built-in networks take their
    width and memory, '{"hidden": 128, "core": "gru"}'. Default: none; with --mode test those
    of the run."""

    @property
    def spec(self) -> ActorSpec:
        """The spec of the network."""
        return ActorSpec(self.model, self.model_kwargs, use_lstm=self.use_lstm)
