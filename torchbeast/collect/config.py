# SPDX-License-Identifier: Apache-2.0
"""Settings of data collection: environments, workers, rollouts, replay."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import ClassVar

from torchbeast.core.base.checks import Settings, at_least, between, require, setting
from torchbeast.fleets.system import available_cores

_ENVS_PER_PROCESS = 16
_USUAL_ENVS = 64
MAX_FIXED_LAG = 509  # shared memory has room for two more versions of the weights
_REPRODUCIBLE_ENVS = 4  # on every machine; with two processes their shares divide most batches


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(Settings):
    """The batch of one update."""

    batch_size: int = setting(8, bounds=(at_least, 1))
    """Rollouts per update, summed over all learners; with dqn, sac and td3: sampled steps per
    update. Default for impala and laser: a quarter of the program's environments, rounded up to a
    power of two and at least 8, which keeps the policy lag at about 4 or less. RayBeast counts
    the environments for this machine's cores: on a larger cluster, give --num_envs too."""
    unroll_length: int = setting(80, bounds=(at_least, 1))
    """Steps per rollout, usually 5 to 128. Longer rollouts give fewer, larger updates and older
    data."""


def usual_batch_size(num_envs: int) -> int:
    """Returns the batch size for which a policy lag of about 4 versions or less is expected.

    Usually an environment plays a rollout while the learner takes num_envs / batch_size batches.
    """
    quarter = -(-num_envs // 4)
    return max(RolloutConfig.batch_size, 1 << (quarter - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class ActorsConfig(Settings):
    """The environments that the program starts."""

    num_envs: int | None = setting(None, bounds=(at_least, 1))
    """Total number of environments. More environments make larger inference batches, but use more
    memory. Default: 16 per worker (one worker per core); more than four workers have 8, 4, 2 or 1
    each, to stay within 64 in total if possible. EnvPool tasks: 256 with impala and laser,
    64 with ppo. A resumed run keeps its number."""

    of_processes: ClassVar[str] = "num_workers"
    """Name of the field with the number of processes that step the environments, if any."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given, name, num_envs = self.given_processes, self.of_processes, self.environments()
        at_least(1, **{name: given})
        require(
            given is None or given <= num_envs,
            f"{name} is {given}, but there are only {num_envs} environments: use at most {name} "
            f"{num_envs}, or set num_envs to {given} or more",
        )

    @property
    def given_processes(self) -> int | None:
        """The number of processes that step the environments, if it was given."""
        return getattr(self, self.of_processes, None)

    def environments(self) -> int:
        """Returns the number of environments; by default one process per core steps them."""
        processes = self.given_processes or available_cores()
        return self.num_envs or self.usual_environments(processes)

    def usual_environments(self, processes: int) -> int:
        """Returns the default number of environments if this number of processes steps them.

        Each process has the same power of two, because such numbers divide most batches evenly.
        """
        share = min(_ENVS_PER_PROCESS, max(1, _USUAL_ENVS // processes))
        return processes << (share.bit_length() - 1)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Settings):
    """Experience replay. --replay_size selects --algo laser unless you give another algorithm."""

    replay_size: int = setting(0, bounds=(at_least, 0))
    """Capacity of the replay buffer in environment steps; the oldest are discarded. 0 means no
    replay. The buffer's memory use is printed at startup."""
    replay_ratio: float = setting(1.0, bounds=(at_least, 0))
    """Replayed rollouts per new rollout in a batch; the LASER paper uses 7. A replayed rollout
    costs as much compute as a new one. With dqn, sac and td3: sampled steps per new step, which
    results in (--replay_ratio / --batch_size) updates per environment step. With inf, learner and
    environments never wait for each other."""
    learn_start: int = setting(0, bounds=(at_least, 0))
    """Do not sample from the replay buffer until it holds this many environment steps. Until then,
    and until it holds a complete episode, laser trains on new rollouts only."""
    checkpoint_replay: bool = False
    """Save the replay buffer with every checkpoint, in a file of the buffer's size. Otherwise a
    resumed run starts with an empty buffer."""
    replay_service: str | None = setting(None, "connection")
    """Address of a replay buffer that several agents share: a socket's path on this machine, or
    ray:NAME of a Ray actor. Set by python -m torchbeast.sweep --shared_replay. --replay_size is
    then the capacity of the shared buffer, and must be the same for all agents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in fields(self):
            require(
                self.replay_size > 0 or getattr(self, each.name) in (0, each.default),
                f"replay_size is 0, but {each.name} needs a replay: set replay_size too",
            )
        require(
            self.replay_service is None or not self.checkpoint_replay,
            "checkpoint_replay saves the replay of one run, but replay_service is shared by "
            "several runs: remove one of the two",
        )

    @property
    def is_used(self) -> bool:
        """Whether the run uses a replay."""
        return self.replay_size > 0 and self.replay_ratio > 0

    def spare_columns(self, rollouts: RolloutConfig) -> int:
        """Returns the number of replayed rollouts in a batch, in addition to the new ones.

        Raises ValueError unless it is a whole number, and the replay has room for a batch and for
        learn_start steps.
        """
        if not self.is_used:
            return 0
        batch_size = rollouts.batch_size
        columns = float(f"{self.replay_ratio * batch_size:.12g}")  # 0.29 * 100 is below 29
        require(
            columns.is_integer(),
            f"replay_ratio {self.replay_ratio:g} times batch_size {batch_size} is {columns:g} "
            "rollouts: change them so that the product is a whole number",
        )
        self._check_room(max(2, batch_size), rollouts.unroll_length)
        return int(columns)

    def _check_room(
        self, rollouts: int, unroll_length: int, total_steps: int | None = None
    ) -> None:
        """Raises ValueError unless the replay has room for this number of rollouts, and learn_start
        is reached.

        total_steps: of the run; None: not known, or the run also trains on new rollouts.
        """
        least, room = rollouts * unroll_length, self.replay_size // unroll_length * unroll_length
        require(
            self.replay_size >= least,
            f"replay_size {self.replay_size} is too small for {rollouts} rollouts of unroll_length "
            f"{unroll_length}: use at least {least}",
        )
        most = room if total_steps is None else min(room, total_steps - 1)
        why = f"replay_size {self.replay_size} holds {room} steps"
        if most < room:
            why = f"total_steps is {total_steps}"
        require(
            self.learn_start <= most,
            f"training never begins after learn_start {self.learn_start} steps, because {why}: "
            f"use at most {most}",
        )

    def check_waits(self, waiting: str) -> None:
        """Raises ValueError if learner and environments never wait for each other.

        waiting: a setting that makes them wait, for the error message.
        """
        require(
            not math.isinf(self.replay_ratio),
            "with replay_ratio inf, learner and environments never wait for each other, but "
            f"{waiting} makes them wait: use a finite replay_ratio",
        )

    def updates_per_step(
        self, batch_size: int, unroll_length: int, total_steps: int | None
    ) -> float:
        """Returns the number of updates per new step, for an algorithm that samples single steps.

        total_steps: of the run; None: not known yet.
        Raises ValueError unless such an algorithm can use the replay.
        """
        require(
            self.is_used,
            "the algorithm trains on replayed steps only: set replay_size and replay_ratio above 0",
        )
        require(
            self.replay_service is None,
            "replay_service shares rollouts among agents of laser, not steps: remove it",
        )
        self._check_room(2, unroll_length, total_steps)
        return self.replay_ratio / batch_size


@dataclass(frozen=True, kw_only=True)
class TransitionsConfig(Settings):
    """How steps (dqn, sac, td3) or rollouts (r2d2) are sampled from the replay buffer."""

    n_step: int = setting(1, bounds=(at_least, 1))
    """Number of steps in n-step returns, usually 1 to 5."""
    priority_exponent: float = setting(0.0, bounds=(between, 0, 1))
    """Prioritisation exponent alpha (Schaul et al. 2016): sample in proportion to |TD error|^alpha.
    Usually 0.5 to 0.7, or 0.9 with r2d2; 0 samples uniformly."""
    priority_beta: float = setting(0.4, bounds=(between, 0, 1))
    """Initial importance-sampling exponent beta (Schaul et al. 2016), annealed linearly to 1 over
    the run; constant with r2d2. Larger values correct more of the bias of prioritised sampling."""
    hindsight_share: float = setting(0.0, bounds=(between, 0, 1))
    """Hindsight experience replay (Andrychowicz et al. 2017): share of sampled steps whose goal is
    replaced by one reached later in the episode, usually 0.8. For environments with goals."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            not self.hindsight_share or self.n_step == 1,
            f"hindsight_share relabels single steps, but n_step is {self.n_step}: set n_step to "
            "1, or remove hindsight_share",
        )

    def check_unused(self, used: Collection[str]) -> None:
        """Raises ValueError for settings that only off-policy algorithms use; used: the others."""
        for each in fields(self):
            value = getattr(self, each.name)
            is_of_steps = each.name == "hindsight_share"
            others = "dqn, sac or td3" if is_of_steps else "dqn, sac, td3 or r2d2"
            require(
                each.name in used or value == each.default,
                f"{each.name} {value:g} does not work with this algorithm: remove it, or set algo "
                f"to {others}",
            )


def split_evenly(total: int, num_groups: int) -> list[int]:
    """Returns the sizes of `num_groups` groups that sum to `total` and differ by at most one."""
    each, more = divmod(total, num_groups)
    return [each + (i < more) for i in range(num_groups)]


@dataclass(frozen=True, kw_only=True)
class BufferedActorsConfig(ActorsConfig):
    """The environments, and the buffers in which their rollouts wait for the learner."""

    num_buffers: int | None = setting(None, bounds=(at_least, 1))
    """Rollout buffers, at least --num_envs; each holds one environment's rollout while it is
    written or waits for the learner. More buffers allow older data, up to about --num_buffers /
    --batch_size updates old. Default: two per environment."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.num_buffers is None or self.num_buffers >= self.environments(),
            f"{self.environments()} environments need as many buffers, but num_buffers is "
            f"{self.num_buffers}: use more num_buffers or fewer num_envs",
        )

    def usual_environments(self, processes: int) -> int:
        usual = super().usual_environments(processes)
        return min(usual, self.num_buffers or usual)  # each needs a buffer

    def buffers(self) -> int:
        """Returns the number of rollout buffers."""
        return self.num_buffers or 2 * self.environments()

    def slots_per_process(self) -> int:
        """Returns the slots per process; a slot holds a rollout of each of its environments."""
        return self.buffers() // self.environments()

    def batches_ahead(self, batch_size: int) -> int:
        """Returns the number of batches that can be filled ahead, in the buffers beyond the slots.

        Because of them, a process with a single slot gets the slot back early.
        """
        return (self.buffers() - self.slots_per_process() * self.environments()) // batch_size


@dataclass(frozen=True, kw_only=True)
class ProcessesConfig(BufferedActorsConfig):
    """Worker processes, which step the environments and run the policy."""

    num_workers: int | None = None
    """Worker processes, each with a copy of the network. Default: one per core, at most one per
    environment. With --fixed_lag: 2, or 1 if --num_envs is odd, regardless of the number of
    cores."""
    fixed_lag: int | None = setting(None, bounds=(at_least, 0))
    """Policy lag for a reproducible run: train on rollouts in a fixed order, collected with weights
    exactly this many updates old. This is slower. --num_envs is then 4 by default, regardless of
    the number of cores. Default: train on whichever rollouts are ready."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.fixed_lag is None or self.fixed_lag <= MAX_FIXED_LAG,
            f"fixed_lag must be at most {MAX_FIXED_LAG}, got {self.fixed_lag}",
        )

    def usual_environments(self, processes: int) -> int:
        if self.fixed_lag is not None:
            return _REPRODUCIBLE_ENVS
        return super().usual_environments(processes)

    def processes(self) -> int:
        """Returns the number of worker processes."""
        if self.num_workers is not None:
            return self.num_workers
        if self.fixed_lag is not None:
            return 2 if self.environments() % 2 == 0 else 1
        return min(self.environments(), available_cores())

    def check_fixed_lag(self, batch_size: int, whose: str = "") -> None:
        """Raises ValueError if the lag is fixed and batches cannot consist of whole rollouts of
        workers.

        whose: where the lag comes from, for the message, such as ", the default of ppo".
        """
        if self.fixed_lag is None:
            return
        num_envs, workers = self.environments(), self.processes()
        share, rest = divmod(num_envs, workers)
        why = f"because fixed_lag is {self.fixed_lag}{whose}"
        free = "or set fixed_lag None to collect freely"
        require(
            not rest,
            f"num_envs {num_envs} must be a multiple of num_workers {workers}, {why}: change one "
            f"of the two, {free}",
        )
        require(
            batch_size % share == 0,
            f"batch_size {batch_size} must be a multiple of the {share} environments of a worker "
            f"(num_envs {num_envs} / num_workers {workers}), {why}: use batch_size "
            f"{max(1, batch_size // share) * share}, {free}",
        )
