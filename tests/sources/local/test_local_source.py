# SPDX-License-Identifier: Apache-2.0
"""The source of the learner's own process keeps the contract of sources; it plays nothing ahead."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from compliance.source import Recording, Running, Setup, SourceCompliance, copy_of, take
from local_running import running_local
from source_envs import Numbered

from torchbeast.core.nest_py import flatten

NUMBERED = Setup(env_id="source_envs:Numbered", num_envs=3, batch_size=3, unroll_length=4)


class TestLocalSource(SourceCompliance):
    def running(self, setup: Setup) -> AbstractContextManager[Running]:
        return running_local(setup)

    def test_it_counts_two_batches_and_the_rollouts_that_are_written(
        self, recording: Recording
    ) -> None:
        """One batch is enough, and one slot, where a frame is stored once."""
        one, setup = recording.rollouts[0], recording.setup
        fields = [field.name for field in dataclasses.fields(one)]
        nests = [getattr(one, name) for name in fields if name != "final_observation"]
        of_batch = sum(leaf.nbytes for leaf in flatten(nests) if isinstance(leaf, torch.Tensor))
        slot = recording.num_bytes - of_batch
        assert 0 < slot <= of_batch * setup.num_envs // setup.batch_size

    def test_a_waiting_batch_is_counted_in_rollouts(self) -> None:
        """None ever waits: it plays what is asked for, when it is asked for."""
        with self.running(NUMBERED) as running:
            assert running.source.status()["collected_steps"] == 0
            for count, _ in zip(range(1, 4), running.source.batches(), strict=False):
                status = running.source.status()
                assert status["collected_steps"] == count * 3 * 4
                assert status["learner_queue_size"] == 0


def test_every_action_of_a_batch_is_chosen_with_the_newest_weights() -> None:
    with running_local(NUMBERED) as running:
        for version, rollout in zip(range(8, 12), running.source.batches(), strict=False):
            assert rollout.policy_version[1:].eq(version - 1).all()
            running.weights.publish(running.agent.model, version)
    assert running.supervisor.failure is None


def test_every_environment_has_a_seed_of_its_own() -> None:
    with running_local(NUMBERED) as running:
        (rollout,) = take(running, 1)
    assert len(rollout.observation[0, :, 0].unique()) == 3


def test_batches_that_are_copied_share_no_memory_and_a_batch_that_is_kept_is_refilled() -> None:
    with running_local(NUMBERED) as running:
        batches = running.source.batches()
        first = next(batches)
        kept = copy_of(first)
        next(batches)
        next(batches)
    assert not torch.equal(first.observation, kept.observation)


def test_an_interrupted_rollout_is_dropped_and_new_episodes_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, left = Numbered.step, [6]

    def interrupted(self: Any, action: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step(self, action)

    monkeypatch.setattr(Numbered, "step", interrupted)
    with running_local(NUMBERED) as running:
        first = copy_of(next(running.source.batches()))
        with pytest.raises(KeyboardInterrupt):
            next(running.source.batches())
        after = copy_of(next(running.source.batches()))
    assert running.supervisor.failure is None
    assert after.done[0].all() and after.observation[0, :, 1].eq(0).all()
    assert after.rollout_index.eq(2).all(), "a number is skipped: nothing joins the two"
    assert not set(first.observation[0, :, 0].tolist()) & set(after.observation[0, :, 0].tolist())
