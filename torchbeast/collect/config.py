# SPDX-License-Identifier: Apache-2.0
"""Settings of sources: environments, workers, rollouts, replay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torchbeast.core.base.checks import at_least, between, require
from torchbeast.fleets.system import available_cores

_ENVS_PER_PROCESS = 16
_USUAL_ENVS = 64
MAX_FIXED_LAG = 509  # shared memory has room for two more versions of the weights
_REPRODUCIBLE_ENVS = 4  # on every machine; with two processes their shares divide most batches


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The batch of an update."""

    batch_size: int = 8
    """Number of rollouts in one update, of all learners together; with dqn, sac and td3 of single
    steps."""
    unroll_length: int = 80
    """Steps in one rollout. Longer rollouts give fewer, larger updates and older data."""

    def __post_init__(self) -> None:
        at_least(1, batch_size=self.batch_size, unroll_length=self.unroll_length)


@dataclass(frozen=True, kw_only=True)
class ActorsConfig:
    """Environments of a run that starts them itself."""

    num_actors: int | None = None
    """Number of environments in all. Each costs memory; more make larger inference batches.
    Default: 16 for each process that steps them, thus 16 per core. With more than four processes it
    is 8, 4, 2 or 1 for each, so that there are at most 64, but one for each process. A resumed run
    keeps its number."""

    of_processes: ClassVar[str] = ""
    """Name of the field with the number of processes that step the environments."""

    def __post_init__(self) -> None:
        given = self.given_processes
        at_least(1, num_actors=self.num_actors, **{self.of_processes: given})
        require(
            given is None or given <= self.environments(),
            f"{self.of_processes} {given} leaves some of them without an environment: give at most "
            f"as many as {self.limit()}",
        )

    @property
    def given_processes(self) -> int | None:
        """The number of processes that step the environments, if it was given."""
        return getattr(self, self.of_processes, None)

    def limit(self) -> str:
        """Returns the setting that limits the number of processes, for an error message."""
        return f"num_actors {self.environments()}"

    def environments(self) -> int:
        """Returns the number of environments; by default one process per core steps them."""
        processes = self.given_processes or available_cores()
        return self.num_actors or self.usual_environments(processes)

    def usual_environments(self, processes: int) -> int:
        """Returns the default number of environments if this number of processes steps them.

        Each process has the same power of two, because such numbers divide most batches evenly.
        """
        share = min(_ENVS_PER_PROCESS, max(1, _USUAL_ENVS // processes))
        return processes << (share.bit_length() - 1)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Experience replay. Without --algo, --replay_size selects laser; --replay_ratio needs it."""

    replay_size: int = 0
    """Environment steps that the replay holds, always the newest; 0: no replay. The program says at
    its start how much memory they take."""
    replay_ratio: float = 1.0
    """Replayed rollouts for each new one in a batch; LASER's paper has 7. Each costs as much to
    learn from as a new one. With dqn, sac and td3: replayed steps for each new one, so that there
    are --replay_ratio / --batch_size updates a step; inf: learner and environments never wait for
    each other."""
    learn_start: int = 0
    """Environment steps in the replay from which on it is learnt from. Before, and until an episode
    is whole, batches hold new rollouts alone."""
    checkpoint_replay: bool = False
    """Save the replay's contents with every checkpoint, in a file as large as they are. Otherwise a
    resumed run starts with an empty replay."""
    replay_service: str | None = None
    """Address of a replay that agents share: the path of a socket on this machine, or ray:NAME for
    a Ray actor. python -m torchbeast.sweep --shared_replay gives it to its agents. --replay_size is
    then that of all agents together, and equal in all."""

    def __post_init__(self) -> None:
        at_least(
            0,
            replay_size=self.replay_size,
            replay_ratio=self.replay_ratio,
            learn_start=self.learn_start,
        )
        require(
            self.replay_size < 2**31, f"replay_size must be below {2**31}, got {self.replay_size}"
        )
        for name in ("replay_ratio", "learn_start", "checkpoint_replay", "replay_service"):
            value, usual = getattr(self, name), getattr(type(self), name)
            require(
                self.replay_size > 0 or value in (0, usual),
                f"{name} needs a replay: give its replay_size too",
            )
        require(
            self.is_used or not (self.checkpoint_replay or self.replay_service),
            "with replay_ratio 0 nothing is replayed that checkpoint_replay could save or "
            "replay_service share: leave out one of them",
        )
        require(
            self.replay_service is None or not self.checkpoint_replay,
            "checkpoint_replay saves the replay of one run, but that of replay_service belongs to "
            "several: leave out one of them",
        )

    @property
    def is_used(self) -> bool:
        """Whether anything is learnt from a replay."""
        return self.replay_size > 0 and self.replay_ratio > 0

    def spare_columns(self, rollouts: RolloutConfig) -> int:
        """Returns the number of replayed rollouts in a batch, beside the new ones.

        Raises ValueError unless it is whole, and unless the replay has room for a batch and for
        learn_start.
        """
        if not self.is_used:
            return 0
        batch_size = rollouts.batch_size
        columns = float(f"{self.replay_ratio * batch_size:.12g}")  # 0.29 * 100 is below 29
        require(
            columns.is_integer(),
            f"replay_ratio {self.replay_ratio:g} of batch_size {batch_size} are {columns:g} "
            "rollouts: give a ratio that makes them whole",
        )
        self._check_room(max(2, batch_size), rollouts.unroll_length)
        return int(columns)

    def _check_room(
        self, rollouts: int, unroll_length: int, total_steps: int | None = None
    ) -> None:
        """Raises ValueError unless there is room for so many rollouts, and learn_start is reached.

        total_steps: of the run; None: not known, or the run goes on without a replay.
        """
        least, room = rollouts * unroll_length, self.replay_size // unroll_length * unroll_length
        require(
            self.replay_size >= least,
            f"replay_size {self.replay_size} has no room for {rollouts} rollouts of unroll_length "
            f"{unroll_length}: give at least {least}",
        )
        most = room if total_steps is None else min(room, total_steps - 1)
        end = "" if total_steps is None else f", and total_steps is {total_steps}"
        require(
            self.learn_start <= most,
            f"learn_start {self.learn_start} is never reached: replay_size {self.replay_size} has "
            f"room for {room} steps{end}: give at most learn_start {most}",
        )

    def check_waits(self, waiting: str) -> None:
        """Raises ValueError if learner and environments never wait for each other.

        waiting: a setting with which they do, for the sentence.
        """
        require(
            not math.isinf(self.replay_ratio),
            "with replay_ratio inf learner and environments never wait for each other, but with "
            f"{waiting} they do: give a finite replay_ratio",
        )

    def updates_per_step(
        self, batch_size: int, unroll_length: int, total_steps: int | None
    ) -> float:
        """Returns the updates for each new step of an algorithm that learns from single steps.

        total_steps: of the run; None: not known yet.
        Raises ValueError unless the replay is one to learn from.
        """
        require(
            self.is_used,
            "the algorithm learns from a replay alone: give replay_size and replay_ratio above 0",
        )
        require(
            self.replay_service is None,
            "replay_service shares rollouts among agents of laser: leave it out",
        )
        self._check_room(2, unroll_length, total_steps)
        return self.replay_ratio / batch_size


@dataclass(frozen=True, kw_only=True)
class TransitionsConfig:
    """Single steps that dqn, sac and td3 sample from their replay."""

    n_step: int = 1
    """Steps whose rewards are added up before a value is estimated, at most."""
    priority_exponent: float = 0.0
    """Sample steps whose values were wrong more often: in proportion to this power of the error's
    size. 0: all equally often."""
    priority_beta: float = 0.4
    """How far losses are weighted to make up for --priority_exponent at first; grows to 1, wholly,
    over the run."""
    hindsight_share: float = 0.0
    """Share of the steps that are learnt from as if their goal had been one that was reached later
    in their episode; 0.8 is usual. For environments with goals."""

    def __post_init__(self) -> None:
        at_least(1, n_step=self.n_step)
        between(
            0,
            1,
            priority_exponent=self.priority_exponent,
            priority_beta=self.priority_beta,
            hindsight_share=self.hindsight_share,
        )
        require(
            not self.hindsight_share or self.n_step == 1,
            f"hindsight_share changes the goal of single steps, but n_step is {self.n_step}: leave "
            "out one of them",
        )

    def check_unused(self) -> None:
        """Raises ValueError where something is asked for that only off-policy algorithms do."""
        for name in ("n_step", "priority_exponent", "priority_beta", "hindsight_share"):
            value, usual = getattr(self, name), getattr(type(self), name)
            require(
                value == usual,
                f"{name} {value:g} is for algorithms that learn from single steps, dqn, sac and "
                "td3: leave it out, or give one of these as algo",
            )


def split_evenly(total: int, num_groups: int) -> list[int]:
    """Returns the sizes of `num_groups` groups that sum to `total` and differ by at most one."""
    each, more = divmod(total, num_groups)
    return [each + (i < more) for i in range(num_groups)]


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
