# SPDX-License-Identifier: Apache-2.0
"""Settings of MonoBeast's source."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.checks import at_least, require
from torchbeast.processes.cores import available_cores
from torchbeast.sources.config import ActorsConfig

MAX_FIXED_LAG = 509  # two more versions of the weights are what shared memory has places for


@dataclass(frozen=True, kw_only=True)
class ProcessesConfig(ActorsConfig):
    """Environments and the processes that act in them."""

    num_processes: int | None = None
    """Actor processes that they are spread over, each with a copy of the network.
    Default: one a core, at most one an environment; with --fixed_lag 2, else 1, on every
    machine."""
    num_buffers: int | None = None
    """Rollouts of one environment that are written or wait for the learner, at least one for each
    of --num_actors; more: older data (at most about --num_buffers / --batch_size updates old).
    Default: two for each environment."""
    fixed_lag: int | None = None
    """Learn from rollouts that were acted with weights exactly this many updates old, in a fixed
    order: the same curve on every machine. Costs speed. Default: whatever is ready."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, num_processes=self.num_processes)
        at_least(0, fixed_lag=self.fixed_lag)
        require(
            self.fixed_lag is None or self.fixed_lag <= MAX_FIXED_LAG,
            f"fixed_lag must be at most {MAX_FIXED_LAG}, got {self.fixed_lag}",
        )
        require(
            self.num_processes is None or self.num_processes <= self.num_actors,
            f"num_processes {self.num_processes} leaves processes without an environment: "
            f"give at most as many as num_actors {self.num_actors}",
        )
        require(
            self.num_buffers is None or self.num_buffers >= self.num_actors,
            f"num_buffers {self.num_buffers} leaves environments without a buffer: "
            f"give at least num_actors {self.num_actors}",
        )

    def processes(self) -> int:
        """How many actor processes."""
        if self.num_processes is not None:
            return self.num_processes
        if self.fixed_lag is not None:
            return 2 if self.num_actors % 2 == 0 else 1
        return min(self.num_actors, available_cores())

    def buffers(self) -> int:
        """How many rollouts of one environment are written or wait."""
        return self.num_buffers or 2 * self.num_actors

    def slots_per_process(self) -> int:
        """A slot holds a rollout of every environment of its process."""
        return self.buffers() // self.num_actors

    def batches_ahead(self, batch_size: int) -> int:
        """What the slots leave of the buffers: batches that are full before a learner wants them,
        so that a process with a single slot gets it back early.
        """
        return (self.buffers() - self.slots_per_process() * self.num_actors) // batch_size

    def check_fixed_lag(self, batch_size: int) -> None:
        """ValueError unless whole rollouts of a process fill a batch, where the lag is fixed."""
        if self.fixed_lag is None:
            return
        each, rest = divmod(self.num_actors, self.processes())
        require(
            not rest and batch_size % each == 0,
            f"with fixed_lag, num_actors {self.num_actors} must be the same for each of "
            f"num_processes {self.processes()}, and batch_size {batch_size} a multiple of each "
            "one's share",
        )
