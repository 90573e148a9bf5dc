# SPDX-License-Identifier: Apache-2.0
"""Measures a replay alone, the run's own and a shared one: inserting and sampling, beside a learner
that drops every batch.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import synthetic
from bench.sample import Measure, Sample, cpu_seconds, in_threads
from torchbeast.collect.contract import LostStream, Source
from torchbeast.collect.replay import Replay
from torchbeast.collect.shared_replay import serving
from torchbeast.core.actors.contract import Agent
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.rollout import Rollout, RolloutSpec
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.fleets.system import free_memory
from torchbeast.on_ray.replay import joined
from torchbeast.run.assemble import LearnerConfig
from torchbeast.run.replay import joined_replay, make_replay, mixed_source

_IN_FLIGHT = 2  # batches
_SEED = 0


@contextmanager
def replay(
    config: LearnerConfig, agent: Agent, extras: Sequence[str], supervisor: Supervisor
) -> Iterator[Measure]:
    """Yields the measurement of batches with replayed rollouts; its steps are env steps."""
    free = free_memory()
    online = _online(config, agent, extras)
    stored = make_replay(config, _rollouts(config, agent, extras), _SEED, online.num_bytes, free)
    with _mixing(online, stored, config, agent, supervisor) as take:
        yield functools.partial(in_threads, [take], supervisor=supervisor)


@contextmanager
def shared_replay(
    config: LearnerConfig, agent: Agent, extras: Sequence[str], supervisor: Supervisor
) -> Iterator[Measure]:
    """Yields the same of a replay in a process of its own, with the CPU time of both processes."""
    with tempfile.TemporaryDirectory(prefix="tb") as folder, serving(Path(folder, "r")) as served:
        service = dataclasses.replace(config.replay, replay_service=served.address)
        config = dataclasses.replace(config, replay=service)
        join = functools.partial(joined, served.address)
        with (
            joined_replay(config, _rollouts(config, agent, extras), _SEED, "bench", join) as shared,
            _mixing(_online(config, agent, extras), shared, config, agent, supervisor) as take,
        ):

            def measure(seconds: float) -> Sample:
                before = cpu_seconds([served.pid])
                sample = in_threads([take], seconds, supervisor)
                others = cpu_seconds([served.pid]) - before
                return sample._replace(cpu_seconds=sample.cpu_seconds + others)

            yield measure


def _online(config: LearnerConfig, agent: Agent, extras: Sequence[str]) -> _Endless:
    """Returns a source of the same batches, with room for replayed rollouts."""
    batch = still_rollout(config, agent, extras)
    size = _rollouts(config, agent, extras).num_bytes(_IN_FLIGHT * batch.batch_size)
    return _Endless([batch.map(torch.clone) for _ in range(_IN_FLIGHT)], size)


def _rollouts(config: LearnerConfig, agent: Agent, extras: Sequence[str]) -> RolloutSpec:
    return RolloutSpec(agent, extras, config.rollouts.unroll_length)


@contextmanager
def _mixing(
    online: Source, replay: Replay, config: LearnerConfig, agent: Agent, supervisor: Supervisor
) -> Iterator[Callable[[], int]]:
    """Yields what takes a batch, drops it and returns its env steps, once batches have replayed
    rollouts.
    """
    at_once = dataclasses.replace(config.replay, learn_start=0)
    config = dataclasses.replace(config, replay=at_once)
    source = mixed_source(online, replay, config, agent, _IN_FLIGHT)
    source.start(supervisor)
    batches = source.batches()

    def take() -> int:
        batch = next(batches, None)
        if batch is None:
            return 0
        _give_back_state(batch)
        return batch.env_steps

    try:
        for batch in batches:
            _give_back_state(batch)
            if batch.replayed is not None:
                break
        yield take
    finally:
        source.close()


def _give_back_state(batch: Rollout) -> None:
    """Hands back the state with which the next replayed rollouts begin, as a learner does."""
    batch.give_feedback(Feedback(final_state=batch.initial_agent_state))


def still_rollout(config: LearnerConfig, agent: Agent, extras: Sequence[str]) -> Rollout:
    """Returns a batch with spare columns in which environments show the same in all rows, so that
    frames make stacks, and every rollout continues the one before. Each is an episode.
    """
    columns = config.rollouts.batch_size + config.spare_columns
    made = synthetic.rollout(
        agent, agent.observation_space, config.rollouts.unroll_length, columns, extras
    )
    ends = torch.zeros_like(made.done)
    ends[[0, -1]] = True

    def still(stacks: Tensor) -> Tensor:
        """Returns the first frame of each column in every place of all stacks."""
        frames = stacks[:1]
        if agent.frame_stack > 1:
            frames = frames[:, :, : stacks.shape[2] // agent.frame_stack]
            frames = torch.cat([frames] * agent.frame_stack, dim=2)
        return frames.expand_as(stacks).clone(memory_format=torch.contiguous_format)

    return dataclasses.replace(
        made,
        observation=map_leaves(still, made.observation),
        reward=torch.zeros_like(made.reward),
        done=ends,
        episode_end=ends,
    )


class _Endless:
    """A source of the same batches again and again, one for each iterator."""

    def __init__(self, rollouts: Sequence[Rollout], num_bytes: int) -> None:
        self._rollouts = iter(rollouts)
        self.num_bytes = num_bytes
        self._numbers = itertools.count()

    def start(self, supervisor: Supervisor) -> None:
        """Does nothing."""

    def batches(self) -> Iterator[Rollout]:
        """Yields one batch, with the number of the next rollouts."""
        rollout = next(self._rollouts)
        while True:
            rollout.rollout_index.fill_(next(self._numbers))
            yield rollout

    def close(self) -> None:
        """Does nothing: no call waits."""

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        """Does nothing."""

    def status(self) -> Mapping[str, float]:
        """Nothing waits."""
        return {"learner_queue_size": 0}

    def seconds(self) -> dict[str, float]:
        """There are no actors."""
        return {}

    def hanging(self) -> str:
        """Nothing hangs."""
        return ""

    def lost_streams(self) -> list[LostStream]:
        """There are no streams."""
        return []
