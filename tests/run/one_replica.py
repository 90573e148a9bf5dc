# SPDX-License-Identifier: Apache-2.0
"""One of several learners that learn as one from given batches; started by test_replicas.py.

python one_replica.py CASE ARGUMENTS...      prints a line of JSON for each event
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from test_learner_run import plan_of

from torchbeast.cli.command_line import flatten, parse
from torchbeast.cli.learner_flags import MonoBeastFlags
from torchbeast.collect.contract import LearnerInfo, LostStream
from torchbeast.core.storages.rollout import Rollout
from torchbeast.errors import exit_code_of
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import launched
from torchbeast.learner import Callback, RunningLearner
from torchbeast.reporting.run_folder import session
from torchbeast.run import checkpoint as checkpoints
from torchbeast.run import learner_run, replicas, training, watch
from torchbeast.run.learner_run import LearnerRun
from torchbeast.run.replicas import replica

T, RANKS, COLUMNS, UPDATES = 5, 2, 4, 4
write_newest = checkpoints.write_newest
SAID = sys.stdout  # what other ranks than 0 print is not shown


def rollout(seed: int, columns: int) -> Rollout:
    """A rollout of random numbers, some of its episodes ended."""
    numbers, shape = torch.Generator().manual_seed(seed), (T + 1, columns)
    ended = torch.rand(shape, generator=numbers) < 0.2
    return Rollout(
        observation=torch.randn(*shape, 4, generator=numbers) * 3 + 1,
        reward=torch.randn(shape, generator=numbers),
        done=ended,
        episode_step=torch.full(shape, 4, dtype=torch.int32),
        episode_return=torch.randn(shape, generator=numbers),
        action=torch.randint(3, shape, generator=numbers),
        extras={"policy_logits": torch.randn(*shape, 3, generator=numbers)},
        initial_agent_state=(),
        truncated=torch.zeros(shape, dtype=torch.bool),
        episode_end=ended,
        policy_version=torch.zeros(shape, dtype=torch.int64),
        final_observation=torch.zeros(0, 4),
        env_index=torch.arange(columns).expand(shape),
        rollout_index=torch.zeros(shape, dtype=torch.int64),
    )


class Slow(Callback):
    """Takes longer than the time limit of the case "slow"."""

    def on_step(self, learner: RunningLearner, metrics: dict[str, float]) -> None:
        if learner.updates in (2, UPDATES):
            time.sleep(5.0)


def say(**event: Any) -> None:
    print(json.dumps(event), file=SAID, flush=True)


class GivenSource:
    """Yields a rank's columns of batches that each rank, and a learner alone, makes by itself.

    In the cases "ends", "slow" and "slow_disk" they end the run; in others the rank that is not
    leading then waits, fails, or gets a NaN.
    """

    num_bytes = 0

    def __init__(self, case: str, first: int, rank: int | None) -> None:
        self._case, self._first, self._rank = case, first, rank
        self._closed = threading.Event()

    def start(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        supervisor.on_close(self._closed.set)

    def batches(self) -> Iterator[Rollout]:
        for seed in range(self._first, self._first + UPDATES):
            whole = rollout(seed, COLUMNS)
            columns = COLUMNS // RANKS
            yield whole if self._rank is None else whole.split(columns)[self._rank]
        if self._case in ("ends", "slow", "slow_disk"):
            self._supervisor.stop("there are no more batches")
        elif self._rank == 1 and self._case == "fails":
            raise RuntimeError("its environment broke")
        elif self._rank == 1 and self._case == "nan":
            batch = rollout(0, COLUMNS // RANKS)
            batch.reward.fill_(float("nan"))
            yield batch
        elif self._rank == 0 and self._case == "nan":
            yield rollout(0, COLUMNS // RANKS)
        else:
            say(waits=True)
        self._closed.wait()

    def close(self) -> None:
        self._closed.set()

    def status(self) -> dict[str, float]:
        return {"learner_queue_size": 0, "collected_steps": 7}

    def seconds(self) -> dict[str, float]:
        return {"environment": 1.0, "inference": 1.0, "queueing": 1.0}

    def hanging(self) -> str:
        return ""

    def lost_streams(self) -> list[LostStream]:
        return []


def learn(case: str, flags: MonoBeastFlags, among: replicas.Replica | None) -> int:
    """Learns until the batches end; says the weights and the seeds of this learner."""
    rank = None if among is None else among.rank
    if among is not None:
        among.check_can_share(flags.rollouts, flags.replay, flags.hardware)
        among.check_same(flags)
    learners: list[LearnerInfo] = []

    def source(learner: LearnerInfo) -> GivenSource:
        learners.append(learner)
        return GivenSource(case, run.made.optimiser_step.version, rank)

    is_kept = among is None or among.leads
    try:
        with session(flags.run.folder, flatten(flags), is_kept) as opened:
            run = LearnerRun(plan_of(flags, source), opened, replica=among)
            run.train()
    finally:
        draw = torch.randint(2**31, ()).item()
        if learners:
            weights = learners[0].rollouts.agent.model.state_dict()
            say(weights=digest(weights), seed=learners[0].seed, draw=draw)
    return 0


def write_slowly(*arguments: Any) -> None:
    """Writes a checkpoint in longer than the time limit of the case "slow_disk"."""
    time.sleep(5.0)
    write_newest(*arguments)


def digest(weights: dict[str, torch.Tensor]) -> str:
    content = b"".join(value.numpy().tobytes() for value in weights.values())
    return hashlib.sha256(content).hexdigest()


def main(case: str, words: list[str]) -> int:
    if case in ("silent", "slow", "slow_disk"):
        replicas.SILENT_S = 3.0
    if case == "slow" and os.environ["RANK"] == "1":  # which waits for rank 0 in the end
        learner_run._JOIN_S = watch._LAST_UPDATE_S = 0.5
    if case == "slow_disk":
        patched: Any = training
        patched.FIRST_CHECKPOINT_S, checkpoints.write_newest = 0.0, write_slowly
    launch, flags_of = launched(), functools.partial(parse, MonoBeastFlags, "monobeast")
    if launch is None:
        return learn(case, flags_of(words), None)
    with replica(launch) as among, among.flags(words, flags_of) as flags:
        return learn(case, flags, among)


if __name__ == "__main__":
    sys.exit(exit_code_of("polybeast_learner", lambda: main(sys.argv[1], sys.argv[2:])))
