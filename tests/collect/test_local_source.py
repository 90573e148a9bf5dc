# SPDX-License-Identifier: Apache-2.0
"""The source of the learner's own process keeps the contract of sources; it plays nothing ahead."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from compliance.source import Recording, Running, Setup, SourceCompliance, copy_of, take
from local_running import running_local
from source_envs import Numbered

from torchbeast.core.base.nest import flatten
from torchbeast.core.storages.rollout import Rollout

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


# --- batches that are cut short

ENDING = dataclasses.replace(NUMBERED, env_id="source_envs:Counting")


def steps_of(rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
    """Returns the fields [steps, E, ...] of the valid steps of rollouts, joined."""
    lengths = [rollout.env_steps // rollout.batch_size for rollout in rollouts]
    names = ("reward", "done", "truncated", "episode_end", "episode_step", "episode_return")

    def joined(field: Callable[[Rollout], torch.Tensor]) -> torch.Tensor:
        pairs = zip(rollouts, lengths, strict=True)
        return torch.cat([field(rollout)[1 : 1 + length] for rollout, length in pairs])

    found = {name: joined(operator.attrgetter(name)) for name in (*names, "observation", "action")}
    return found | {"policy_logits": joined(lambda rollout: rollout.extras["policy_logits"])}


@pytest.mark.parametrize("env", ["Counting", "Stacked", "Numbered"])
def test_a_batch_that_is_cut_short_goes_on_in_the_next_as_if_it_had_not_been(env: str) -> None:
    """The second of five batches has two steps and not four, the fourth has one; nobody is asked
    after a batch's last step."""
    setup = dataclasses.replace(NUMBERED, env_id=f"source_envs:{env}")
    with running_local(setup) as running:
        whole = steps_of(take(running, 4))
    asked = itertools.count(1)
    with running_local(setup, stops_early=lambda share: next(asked) in (5, 9)) as running:
        rollouts = take(running, 5)
        assert running.source.status()["collected_steps"] == 15 * 3
    assert [rollout.env_steps for rollout in rollouts] == [12, 6, 12, 3, 12]
    assert [rollout.valid is None for rollout in rollouts] == [True, False, True, False, True]
    for name, cut in steps_of(rollouts).items():
        torch.testing.assert_close(cut, whole[name][:15], rtol=0, atol=0)
    for rollout in rollouts:
        assert len(rollout.final_observation) == len(rollout.truncations()[0])


def test_the_rows_after_a_cut_repeat_the_last_and_begin_the_next_rollout() -> None:
    """In row 2 an episode ends, and no other does in the rows that repeat it."""
    with running_local(ENDING, stops_early=lambda share: share == 0.5) as running:
        first, second = take(running, 2)
    assert first.valid is not None and first.valid[:, 0].tolist() == [True] * 3 + [False] * 2
    assert first.done[2].any()
    for name in ("observation", "action", "episode_step", "episode_return"):
        rows = getattr(first, name)
        assert rows[3].equal(rows[2]) and rows[4].equal(rows[2]), name
        assert getattr(second, name)[0].equal(rows[2]), name
    for name in ("reward", "done", "truncated", "episode_end"):
        assert not getattr(first, name)[3:].any(), name


def test_at_least_one_step_of_every_batch_is_played() -> None:
    with running_local(NUMBERED, stops_early=lambda share: True) as running:
        assert [rollout.env_steps for rollout in take(running, 3)] == [3, 3, 3]


def test_a_batch_of_two_rollouts_an_environment_is_cut_as_a_whole() -> None:
    setup = dataclasses.replace(NUMBERED, batch_size=6)
    with running_local(setup, stops_early=lambda share: share >= 0.75) as running:
        (rollout,) = take(running, 1)
    assert rollout.valid is not None
    assert rollout.valid[1:].sum(0).tolist() == [4, 4, 4, 2, 2, 2]
