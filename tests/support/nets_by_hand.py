# SPDX-License-Identifier: Apache-2.0
"""The Atari networks as formulas over their weights: logits and baselines [T, B, ...] of inputs.

They use nothing of torchbeast: the formulas of the original's networks are written out here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def shallow_by_hand(w: dict[str, Tensor], inputs: Any) -> tuple[Tensor, Tensor]:
    """Computes the shallow network of the original."""
    return three_convolutions_by_hand(w, inputs, inputs.observation.flatten(0, 1).float() / 255.0)


def shallow_norm_by_hand(w: dict[str, Tensor], inputs: Any) -> tuple[Tensor, Tensor]:
    x = inputs.observation.flatten(0, 1).float()
    variances, means = torch.var_mean(x, (1, 2, 3), correction=0, keepdim=True)
    return three_convolutions_by_hand(w, inputs, (x - means) / (variances + 1.0).sqrt())


def three_convolutions_by_hand(
    w: dict[str, Tensor], inputs: Any, x: Tensor
) -> tuple[Tensor, Tensor]:
    for name, stride in (("conv1", 4), ("conv2", 2), ("conv3", 1)):
        x = F.relu(F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], stride))
    x = F.relu(F.linear(x.flatten(1), w["fc.weight"], w["fc.bias"])).view(*inputs.reward.shape, -1)
    one_hot = F.one_hot(inputs.last_action, len(w["policy.bias"])).float()
    x = torch.cat([x, inputs.reward.clamp(-1, 1).unsqueeze(-1), one_hot], -1)
    return heads_by_hand(w, x, inputs)


def deep_by_hand(w: dict[str, Tensor], inputs: Any) -> tuple[Tensor, Tensor]:
    def conv(x: Tensor, name: str) -> Tensor:
        return F.conv2d(x, w[f"{name}.weight"], w[f"{name}.bias"], padding=1)

    x = inputs.observation.flatten(0, 1).float() / 255.0
    for i in range(3):
        x = F.max_pool2d(conv(x, f"feat_convs.{i}.0"), 3, 2, padding=1)
        for block in ("resnet1", "resnet2"):
            x = x + conv(F.relu(conv(F.relu(x), f"{block}.{i}.1")), f"{block}.{i}.3")
    x = F.relu(F.linear(F.relu(x).flatten(1), w["fc.weight"], w["fc.bias"])).view(
        *inputs.reward.shape, -1
    )
    x = torch.cat([x, inputs.reward.clamp(-1, 1).unsqueeze(-1)], -1)
    return heads_by_hand(w, x, inputs)


def heads_by_hand(w: dict[str, Tensor], x: Tensor, inputs: Any) -> tuple[Tensor, Tensor]:
    if "core.weight_ih_l0" in w:
        x = lstm_by_hand(w, x, inputs.done)
    logits = F.linear(x, w["policy.weight"], w["policy.bias"])
    return logits, F.linear(x, w["baseline.weight"], w["baseline.bias"]).squeeze(-1)


def lstm_by_hand(w: dict[str, Tensor], x: Tensor, done: Tensor) -> Tensor:
    """Computes all layers from a zero state, which is zeroed again before each done row."""
    layer = 0
    while f"core.weight_ih_l{layer}" in w:
        ih, hh, b_ih, b_hh = (
            w[f"core.{kind}_l{layer}"] for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h = c = torch.zeros(x.shape[1], hh.shape[1])
        rows = []
        for row, ended in zip(x, done, strict=True):
            h, c = h * ~ended[:, None], c * ~ended[:, None]
            i, f, g, o = (row @ ih.T + b_ih + h @ hh.T + b_hh).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            rows.append(h)
        x, layer = torch.stack(rows), layer + 1
    return x
