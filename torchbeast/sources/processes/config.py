# SPDX-License-Identifier: Apache-2.0
"""Settings of MonoBeast's source."""

from __future__ import annotations

from dataclasses import dataclass

from torchbeast.core.checks import at_least, require
from torchbeast.processes.system import available_cores
from torchbeast.sources.config import ActorsConfig

MAX_FIXED_LAG = 509  # shared memory has room for two more versions of the weights
_REPRODUCIBLE_ENVS = 4  # on every machine; with two processes their shares divide most batches


@dataclass(frozen=True, kw_only=True)
class BufferedActorsConfig(ActorsConfig):
    """Environments whose rollouts wait in buffers."""

    num_buffers: int | None = None
    """Number of rollouts of one environment that are being written or wait for the learner, at
    least --num_actors. More buffers mean older data, at most about --num_buffers / --batch_size
    updates old. Default: two per environment.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, num_buffers=self.num_buffers)
        require(
            self.num_buffers is None or self.num_buffers >= self.environments(),
            f"num_buffers {self.num_buffers} leaves environments without a buffer: "
            f"give at least num_actors {self.environments()}",
        )

    def usual_environments(self, processes: int) -> int:
        usual = super().usual_environments(processes)
        return min(usual, self.num_buffers or usual)  # each needs a buffer

    def limit(self) -> str:
        is_given = self.num_actors is None and self.num_buffers == self.environments()
        return f"num_{'buffers' if is_given else 'actors'} {self.environments()}"

    def buffers(self) -> int:
        """Returns the number of rollouts of one environment that are written or wait."""
        return self.num_buffers or 2 * self.environments()

    def slots_per_process(self) -> int:
        """Returns the slots per process; a slot holds a rollout of each of its environments."""
        return self.buffers() // self.environments()

    def batches_ahead(self, batch_size: int) -> int:
        """Returns the number of batches that can be filled ahead in the buffers beyond the slots.

        With them a process with a single slot gets it back early.
        """
        return (self.buffers() - self.slots_per_process() * self.environments()) // batch_size


@dataclass(frozen=True, kw_only=True)
class ProcessesConfig(BufferedActorsConfig):
    """Environments, and the actor processes that step them and choose actions."""

    num_processes: int | None = None
    """Number of actor processes, each with a copy of the network. Default: one per core, at most
    one per environment; with --fixed_lag on every machine 2, or 1 if --num_actors is odd.
    """
    fixed_lag: int | None = None
    """Make the run reproducible: learn from rollouts collected with weights exactly this many
    updates old, in a fixed order. Costs speed. --num_actors is then 4 by default, on every machine.
    Default: learn from whatever is ready.
    """

    of_processes = "num_processes"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, fixed_lag=self.fixed_lag)
        require(
            self.fixed_lag is None or self.fixed_lag <= MAX_FIXED_LAG,
            f"fixed_lag must be at most {MAX_FIXED_LAG}, got {self.fixed_lag}",
        )

    def usual_environments(self, processes: int) -> int:
        if self.fixed_lag is not None:
            return _REPRODUCIBLE_ENVS
        return super().usual_environments(processes)

    def processes(self) -> int:
        """Returns the number of actor processes."""
        if self.num_processes is not None:
            return self.num_processes
        if self.fixed_lag is not None:
            return 2 if self.environments() % 2 == 0 else 1
        return min(self.environments(), available_cores())

    def check_fixed_lag(self, batch_size: int) -> None:
        """Raises ValueError if the lag is fixed and whole rollouts of processes cannot fill a
        batch.
        """
        if self.fixed_lag is None:
            return
        each, rest = divmod(self.environments(), self.processes())
        require(
            not rest and batch_size % each == 0,
            f"with fixed_lag, num_actors {self.environments()} must be the same for each of "
            f"num_processes {self.processes()}, and batch_size {batch_size} a multiple of each "
            "one's share",
        )
