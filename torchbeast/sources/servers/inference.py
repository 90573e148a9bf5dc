# SPDX-License-Identifier: Apache-2.0
"""The work of PolyBeast's inference threads: choosing actions for a batch of environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchbeast.core.actors.contract import Actor, Mode, ModelInputs
from torchbeast.core.device import CudaStream
from torchbeast.core.nest_py import map_leaves
from torchbeast.processes.cores import available_cores


def inference_threads(count: int | None, device: torch.device) -> int:
    """Returns the number of inference threads; count: the setting, None: chosen by the hardware.

    On the CPU acting takes at most a quarter of a step, and more threads only make smaller batches.
    Each thread also uses torch's threads inside its operations.
    """
    if count is not None:
        return count
    on_cpu = max(1, available_cores() // (4 * torch.get_num_threads()))
    return 2 if device.type == "cuda" else on_cpu


def answer(
    replica: Actor,
    cuda_stream: CudaStream,
    inputs: Any,
    extras: Sequence[str],
    mode: Mode = "sample",
) -> Any:
    """Returns `((action, extras), (state, action))` for one batch, on the CPU.

    replica: is on the device of the CUDA stream.
    inputs: `((observation, reward, done, episode_step, episode_return), (state, last_action))` from
    the actor pool, leaves [1, B, ...] and [layers, B, ...].
    extras: names of the extras to return, as a dict.
    """
    (observation, reward, done, _, _), (state, last_action) = inputs
    seen = (observation, reward, done, last_action), state
    model_inputs, state = map_leaves(cuda_stream.to_device, seen)
    acted = replica.act(ModelInputs(*model_inputs), state, mode)
    wanted = {name: acted.extras[name] for name in extras}
    on_host = map_leaves(cuda_stream.to_host, (acted.action, wanted, acted.state))
    cuda_stream.synchronize()
    action, wanted, state = on_host
    return (action, wanted), (state, action)
