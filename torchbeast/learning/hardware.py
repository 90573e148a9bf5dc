# SPDX-License-Identifier: Apache-2.0
"""Chooses device, precision, threads and slices of a learner from its Config and the hardware."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchbeast.core.actors.agent import Agent
from torchbeast.core.actors.contract import Actor
from torchbeast.core.algos.slices import columns_of_a_slice
from torchbeast.core.ambient import use_threads
from torchbeast.core.precision import has_bfloat16
from torchbeast.core.specs import Precision
from torchbeast.errors import UsageError
from torchbeast.learning.config import HardwareConfig
from torchbeast.processes.cores import available_cores

# Observations of 96 Atari rows. Measured with both Atari networks on two cores with 1 MiB of L2
# cache each: half the size has more overhead, twice the size is slower with the deep network.
CPU_BYTES_AT_ONCE = 96 * 4 * 84 * 84


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The chosen device, precision and threads."""

    device: torch.device
    precision: Precision  # of features
    threads: int  # number of CPU cores that the learner may use
    bytes_at_once: int | None  # bytes of observations in a slice; None: the whole batch
    is_whole: bool  # only one thread at a time may use the network to learn
    learner_threads: int  # threads that prepare batches and learn from them

    def summary(self, model: Actor) -> str:
        """Returns a line for the start of a run."""
        where = f"on {self.device}" if self.device.type == "cuda" else "on the CPU"
        threads = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"Computing {where} in {self._numbers(model)}, {self._slices()}, with {threads}."

    def _numbers(self, model: Actor) -> str:
        name = str(model.compute_dtype).removeprefix("torch.")
        has = "has" if has_bfloat16(self.device) else "does not have"
        small = ", which this network does not gain from" if self._leaves_out(model) else ""
        return f"{name} (this hardware {has} bfloat16{small})"

    def _leaves_out(self, model: Actor) -> bool:
        is_open = self.precision == "auto" and has_bfloat16(self.device)
        return is_open and model.compute_dtype == torch.float32

    def _slices(self) -> str:
        if self.bytes_at_once is None:
            return "whole batches at once"
        return f"{self.bytes_at_once / 1e6:.1f} MB of observations at once"


def choose(config: HardwareConfig, reproducible: bool = False) -> Compute:
    """Chooses what the Config leaves open from the hardware.

    Raises UsageError for a GPU that is not there.

    reproducible: choose the same on every machine, and only sums that do not depend on the order in
        which threads finish.
    """
    device = _device(config)
    use_cuda = device.type == "cuda"
    return Compute(
        device=device,
        precision=precision(config, reproducible),
        threads=config.torch_threads or (1 if reproducible else available_cores()),
        bytes_at_once=_bytes_at_once(config.megabytes_at_once, device),
        is_whole=use_cuda or config.compile or reproducible,
        learner_threads=config.num_learner_threads or (2 if use_cuda else 1),
    )


def share_cores(compute: Compute, columns: int, unroll_length: int, agent: Agent) -> int:
    """Returns the number of threads that learn from slices, and sets torch's number of threads.

    columns: of a batch.

    The cores are divided: each of the threads uses an equal share inside torch's operations. One
    thread learns on a GPU, from a single slice, in reproducible runs (the order of sums is fixed)
    and with a compiled network. Call it before other threads use torch: new threads take over
    torch's setting.
    """
    size = columns, (unroll_length + 1) * agent.observation_bytes
    at_once = columns_of_a_slice(agent.model, size, compute.bytes_at_once, compute.threads)
    over_slices = 1 if compute.is_whole else min(compute.threads, -(-columns // at_once))
    use_threads(max(1, compute.threads // over_slices))
    return over_slices


def precision(config: HardwareConfig, reproducible: bool) -> Precision:
    """Returns the precision of features on all devices; "auto": each device chooses."""
    return "float32" if reproducible and config.precision == "auto" else config.precision


def _device(config: HardwareConfig) -> torch.device:
    """Returns the device of a Config; raises UsageError for a GPU that is not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.stays_on_cpu or (config.device == "auto" and not count):
        return torch.device("cpu")
    device = torch.device("cuda:0" if config.device == "auto" else config.device)
    if device.index >= count:
        raise UsageError(
            f"--device {config.device} is not there, torch finds {count} GPUs: give one below "
            f"{count}, or --device auto"
        )
    return device


def _bytes_at_once(megabytes: float | None, device: torch.device) -> int | None:
    if megabytes is None:
        return CPU_BYTES_AT_ONCE if device.type == "cpu" else None
    return int(megabytes * 1e6) or None
