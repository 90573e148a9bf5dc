# SPDX-License-Identifier: Apache-2.0
"""Settings of the learner: its use of this machine, checkpoints, and the clipping of rewards."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from torchbeast.core.base.checks import at_least, require
from torchbeast.core.base.specs import Precision, RewardClipping
from torchbeast.envs.atari import is_atari


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The learner's use of this machine."""

    num_learner_threads: int | None = None
    """Threads that prepare batches and learn from them, one update at a time; also --num_threads.
    Default: 2 with a GPU (one copies while the other learns), else 1."""
    torch_threads: int | None = None
    """CPU threads of an update: each learns from slices of the batch, whose gradients are added in
    no fixed order. Default: the cores this process may use; with --fixed_lag 1. With --fixed_lag
    more threads run inside operations, and their number changes the order of sums."""
    precision: Precision = "auto"
    """Floating-point type of features; everything else is float32. auto: bfloat16 where the
    hardware supports it (AMX, AVX512-BF16, tensor cores), except for small networks on the CPU;
    otherwise float32, and with --fixed_lag too."""
    megabytes_at_once: float | None = None
    """Size of a slice of the batch, in MB of observations; 0: the whole batch. Small slices fit the
    cache, large ones have less overhead; the gradients are the same. Default: 2.7 on the CPU, the
    whole batch on a GPU."""
    compile: bool = False
    """Compile the network for learning with torch.compile. Needs a C++ compiler, and a minute or
    more at the start. It gained nothing on the CPU it was measured on.
    """
    device: str = "auto"
    """Where the learner computes: cpu; cuda:1, the GPU with this number; auto, the first GPU, or
    the CPU if there is none. Of several learners that torchrun starts, auto gives each a GPU of its
    own."""
    disable_cuda: bool = False
    """Use the CPU even if there is a GPU, as --device cpu."""
    write_profiler_trace: bool = False
    """Write a trace of some updates on one thread (trace.json, for chrome://tracing) to the run's
    folder. Slows those updates."""

    @property
    def stays_on_cpu(self) -> bool:
        """Whether no GPU is used, even if there is one."""
        return self.disable_cuda or self.device == "cpu"

    def __post_init__(self) -> None:
        at_least(1, num_learner_threads=self.num_learner_threads, torch_threads=self.torch_threads)
        at_least(0, megabytes_at_once=self.megabytes_at_once)
        require(
            re.fullmatch(r"auto|cpu|cuda:\d+", self.device) is not None,
            f"device must be auto, cpu, or a GPU's number as in cuda:0, got {self.device!r}",
        )
        require(
            not self.disable_cuda or not self.device.startswith("cuda"),
            f"device {self.device} is a GPU, which disable_cuda rules out: leave out one of them",
        )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length of the training. A step is one agent step of one environment (four Atari frames)."""

    total_steps: int = 100_000
    """Environment steps to learn from; the learning rate reaches 0 there."""

    def __post_init__(self) -> None:
        at_least(1, total_steps=self.total_steps)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints."""

    disable_checkpoint: bool = False
    """Write no model.tar: the run can be neither resumed nor evaluated."""
    checkpoint_interval: float = 600.0
    """Seconds between checkpoints; one is also written at the end, on Ctrl-C, SIGTERM or SIGHUP."""
    keep_checkpoints: int = 3
    """Number of checkpoints that are kept: model.tar, the one before it as model.1.tar, and so on.
    If model.tar is damaged, the one before takes its place."""

    def __post_init__(self) -> None:
        interval, keep = self.checkpoint_interval, self.keep_checkpoints
        at_least(1, checkpoint_interval=interval, keep_checkpoints=keep)


UNKNOWN = "unknown"  # environment of servers of the original TorchBeast, which do not name it


def resolved(clipping: Literal["auto", RewardClipping], env_id: str) -> RewardClipping:
    """Returns the clipping to use; "auto" is resolved by the environment.

    Atari games have scores of very different sizes, from 1 in Pong to thousands, so their rewards
    are clipped. Elsewhere the size of a reward is meaningful: clipping makes Taxi's -10 for a
    forbidden action equal to the -1 of every other step. With an unknown environment rewards are
    clipped, the default of the original's learner.
    """
    if clipping != "auto":
        return clipping
    return "abs_one" if env_id == UNKNOWN or is_atari(env_id) else "none"


def sentence(clipping: str) -> str:
    """Returns a sentence about the clipping, for the start of a run."""
    how = {"abs_one": "clipped to [-1, 1]", "none": "as they are"}[clipping]
    return f"Learning from rewards {how} (reward_clipping {clipping})."
