# SPDX-License-Identifier: Apache-2.0
"""Settings of the learner: how it uses this machine, and its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.checks import at_least
from torchbeast.core.choices import Precision


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """How the learner uses this machine."""

    num_learner_threads: int | None = None
    """Threads that prepare and learn batches, one update at a time; also --num_threads.
    Default: 2 with a GPU (one copies while one learns), else 1."""
    torch_threads: int | None = None
    """Threads that an update computes with on the CPU: each learns slices of the batch, which are
    added up in no certain order. Default: the cores this process may use; with --fixed_lag 1,
    and more are inside of operations, because another number adds up in another order."""
    precision: Precision = "auto"
    """What features are computed in; everything else is float32. auto: bfloat16 where the hardware
    multiplies it (AMX, AVX512-BF16, tensor cores), else float32; with --fixed_lag float32."""
    megabytes_at_once: float | None = None
    """Observations (MB) whose gradients are computed at once; 0: all. Less fits the cache, more
    has less overhead; what is learnt is the same. Default: 2.7 on the CPU, all on a GPU."""
    compile: bool = False
    """Compile the network for learning with torch.compile: a minute and more at the start, and a
    C++ compiler. It gained nothing on the CPU it was measured on."""
    disable_cuda: bool = False
    """Use the CPU although there is a GPU."""
    write_profiler_trace: bool = False
    """Write trace.json (chrome://tracing) of some updates to the run's folder, as one thread sees
    them. Slows those updates."""

    def __post_init__(self) -> None:
        at_least(1, num_learner_threads=self.num_learner_threads)
        at_least(1, torch_threads=self.torch_threads)
        at_least(0, megabytes_at_once=self.megabytes_at_once)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written."""

    disable_checkpoint: bool = False
    """Write no model.tar: the run can be neither resumed nor tested."""
    checkpoint_interval: float = 600.0
    """Seconds between checkpoints; one is also written at the end, on Ctrl-C and on SIGTERM."""

    def __post_init__(self) -> None:
        at_least(1, checkpoint_interval=self.checkpoint_interval)
