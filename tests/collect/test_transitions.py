# SPDX-License-Identifier: Apache-2.0
"""Rollouts that become transitions: how many updates, what they count, until which end.

The online source plays a line of numbers (test_mixed.py): of every row everything is known.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from background import Background, wait_for
from test_mixed import B, Event, Line, T, batch, final_of, row, specs

from torchbeast.collect.replayed import (
    FreeTransitions,
    Schedule,
    SynchronousTransitions,
    TransitionSource,
    _Collected,
)
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.replay.transition_replay import UNIFORM, TransitionReplay
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.storages.transition import Transitions
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor

SOON = 30.0
SIZE = 6  # of a batch
STEPS = T * B  # of a rollout batch


class EndingLine(Line):
    """Ends after some rollouts."""

    def __init__(self, count: int) -> None:
        self.taken: list[Event] = []
        super().__init__(self.taken, 0, False)
        self._count = count

    def batches(self) -> Iterator[Rollout]:
        for rollout, _ in zip(super().batches(), range(self._count), strict=False):
            yield rollout
            for leaf in (rollout.observation, rollout.reward, rollout.policy_version):
                leaf.fill_(-1)  # type: ignore[union-attr]  # its memory is used again


@contextmanager
def starting(
    line: Line,
    rate: float = 0.5,
    learn_start: int = 0,
    first_step: int = 0,
    kind: type[TransitionSource] = TransitionSource,
    **how: Any,
) -> Iterator[tuple[TransitionSource, Supervisor]]:
    replay = TransitionReplay(specs(False), 4000, seed=1, sampling=replace(UNIFORM, **how))
    schedule = Schedule(
        batch_size=SIZE,
        updates_per_step=rate,
        learn_start=learn_start,
        total_steps=1000,
        first_step=first_step,
        beta=0.4 if how.get("priority_exponent") else None,
    )
    source = kind(line, replay, schedule)
    supervisor = Supervisor()
    source.start(supervisor)
    try:
        yield source, supervisor
    finally:
        supervisor.stop("the test ends")
        assert supervisor.join(SOON) == []


PACED = pytest.mark.parametrize("kind", [TransitionSource, SynchronousTransitions])


@PACED
@pytest.mark.parametrize(("rate", "learn_start"), [(0.5, 0), (0.3, 100), (2.0, 37), (0.02, 10)])
def test_updates_are_as_many_as_the_schedule_says_and_every_step_counts_once(
    rate: float, learn_start: int, kind: type[TransitionSource]
) -> None:
    count = 60
    with starting(EndingLine(count), rate, learn_start, kind=kind) as (source, supervisor):
        batches = list(source.batches())
    assert supervisor.failure is None
    assert len(batches) == int((count * STEPS - learn_start) * rate + 1e-9)
    counted = [each.env_steps for each in batches]
    uncounted = count * STEPS - sum(counted)
    assert 0 <= uncounted < 1 / rate + STEPS
    assert counted[0] > learn_start and all(steps % STEPS == 0 for steps in counted)
    assert all(each.batch_size == SIZE for each in batches)
    collected = 0
    for number, steps in enumerate(counted, start=1):
        collected += steps
        assert number <= (collected - learn_start) * rate + 1e-9, "no update is early"


@PACED
def test_transitions_are_those_of_the_line_and_its_memory_is_its_own_again(
    kind: type[TransitionSource],
) -> None:
    ends = 0
    with starting(EndingLine(40), rate=1.0, kind=kind) as (source, _):
        batches = list(source.batches())
    for each in batches:
        starts, afters = each.observation[:, 0].long(), each.next_observation[:, 0]
        for b, number in enumerate(starts.tolist()):
            truth = row(number + 1)
            assert (each.reward[b], each.action[b]) == (truth["reward"], truth["action"])
            assert each.policy_version[b] == truth["policy_version"]  # type: ignore[index]
            assert each.terminated[b] == (truth["done"] and not truth["truncated"])
            if truth["truncated"]:
                assert afters[b].tolist() == final_of(number + 1)[0]
            elif not truth["done"]:
                assert afters[b] == number + 1
            ends += truth["done"]
    assert ends > 30


def test_episodes_are_reported_once_and_lags_are_those_of_the_new_steps() -> None:
    count = 30
    with starting(EndingLine(count), rate=0.25) as (source, _):
        batches = list(source.batches())
    expected: list[tuple[float, int]] = []
    for index in range(count):
        rollout = batch(index, 0, False)
        expected += zip(*rollout.finished_episodes(), strict=True)
    found = [episode for each in batches for episode in each.episodes]
    assert found == expected[: len(found)] and len(found) > 10
    for index, each in enumerate(batches):  # one update for 4 steps: two for a rollout batch
        lags = each.lags(version=100)
        new = index % 2 == 0
        assert ("mean_lag" in lags) == new
        if new:
            versions = batch(index // 2, 0, False).policy_version[1:]
            assert lags["mean_lag"] == pytest.approx(100 - versions.double().mean().item())
            assert lags["max_lag"] == 100 - versions.min().item()
        assert each.policy_version is not None
        ages = 100 - each.policy_version.double().mean().item()
        assert lags["replay_age"] == pytest.approx(ages)


def test_lags_are_those_of_valid_steps_of_which_there_may_be_none() -> None:
    counts, rollout = _Collected(), batch(0, 0, False)
    valid = torch.zeros_like(rollout.done)
    counts.add(rollout.keeping(valid))
    assert (counts.steps, counts.versions, counts.oldest) == (0, 0, None)
    valid[2, 0] = True
    counts.add(rollout.keeping(valid))
    version = int(rollout.policy_version[2, 0])
    assert (counts.steps, counts.versions, counts.oldest) == (1, version, version)


def test_uniform_samples_do_not_depend_on_the_speed_of_the_learner() -> None:
    found = []
    for pause in (False, True):
        with starting(EndingLine(10)) as (source, _):
            batches = []
            for each in source.batches():
                if pause:
                    wait_for(lambda: len(source._ready) == 2 or source._ended, SOON)
                batches.append(each.observation)
            found.append(torch.stack(batches))
    assert torch.equal(*found)


def learn_by_priority(source: TransitionSource, count: int, sizes: Any) -> list[Transitions]:
    batches = []
    for each, _ in zip(source.batches(), range(count), strict=False):
        assert each.weights is not None
        each.give_feedback(Feedback(priorities=sizes(each)))
        batches.append(each)
    return batches


def test_what_the_learner_says_of_errors_decides_what_is_sampled_next() -> None:
    def odd(each: Transitions) -> torch.Tensor:
        return torch.where(each.observation[:, 0] % 2 == 1, 10.0, 0.01)

    line = EndingLine(100)
    with starting(line, rate=5.0, priority_exponent=1.0) as (source, supervisor):
        batches = learn_by_priority(source, 1500, odd)
    assert supervisor.failure is None
    late = torch.cat([each.observation[:, 0] for each in batches[-500:]])
    assert (late % 2 == 1).float().mean() > 0.8
    weights = torch.cat([each.weights for each in batches[-500:]])  # type: ignore[misc]
    assert weights.max() == 1 and weights[late % 2 == 1].min() < 0.2


def test_priorities_that_are_not_returned_are_a_sentence() -> None:
    with (
        starting(EndingLine(100), priority_exponent=1.0) as (source, _),
        pytest.raises(RunError, match="did not return priorities for a batch"),
    ):
        learn_by_priority(source, 10, lambda each: None)


def test_importance_weights_grow_whole_over_the_run() -> None:
    schedule = Schedule(
        batch_size=1, updates_per_step=1, learn_start=0, total_steps=100, first_step=20, beta=0.4
    )
    assert [schedule.beta_at(steps) for steps in (0, 30, 80, 500)] == pytest.approx(
        [0.4 + 0.6 * 0.2, 0.7, 1.0, 1.0]
    )


# --- endings


def test_closing_wakes_everyone_who_waits() -> None:
    line = Line([], 0, False)
    line.held.clear()
    with starting(line) as (source, supervisor):
        waiting = [Background(list, source.batches()) for _ in range(2)]
        source.close()
        source.close()
        assert [waiter.result(SOON) for waiter in waiting] == [[], []]
    assert supervisor.failure is None


def test_closing_ends_a_source_whose_batches_nobody_takes() -> None:
    with starting(Line([], 0, False), rate=3.0) as (source, _):
        wait_for(lambda: len(source._ready) == 2, SOON)
    assert list(source.batches()) == []


def test_a_failure_of_the_online_source_ends_the_run() -> None:
    line = Line([], 0, False)
    line.fails_at = 3
    with starting(line) as (source, supervisor):
        assert len(list(source.batches())) <= 3 * STEPS
        wait_for(lambda: supervisor.ended, SOON)
    assert supervisor.failure is not None and "the line is cut" in str(supervisor.failure)


def test_learner_threads_share_the_batches() -> None:
    with starting(EndingLine(40), rate=1.0) as (source, _):
        found: list[int] = []
        lock = threading.Lock()

        def learn() -> None:
            for each in source.batches():
                with lock:
                    found.append(each.env_steps)

        for learner in [Background(learn) for _ in range(3)]:
            learner.result(SOON)
    assert len(found) == 40 * STEPS and sum(found) == 40 * STEPS


def test_collecting_waits_for_learning() -> None:
    line = EndingLine(1000)
    with starting(line, rate=1.0) as (source, _):
        batches = source.batches()
        for taken in range(1, 30):
            next(batches)
            wait_for(lambda: len(source._ready) == 2, SOON)
            rollouts = sum(kind == "taken" for kind, _ in line.taken)
            assert rollouts <= 1 + (taken + 3) // STEPS


def test_it_fills_the_fields_of_a_batch() -> None:
    with starting(EndingLine(10), n_step=3) as (source, _):
        each = next(source.batches())
    assert each.later_rewards is not None and each.later_rewards.shape == (SIZE, 2)
    assert each.num_joined is not None and each.num_joined.max() <= 3
    names = {field.name for field in dataclasses.fields(each)}
    assert {name for name in names if getattr(each, name) is None} == {"weights"}


# --- synchronous


def taken(line: EndingLine) -> int:
    return sum(kind == "taken" for kind, _ in line.taken)


def test_a_synchronous_source_collects_only_when_no_update_is_due() -> None:
    line = EndingLine(100)
    with starting(line, rate=0.75, kind=SynchronousTransitions) as (source, _):
        assert taken(line) == 0, "nothing before it is asked"
        for number, _ in enumerate(itertools.islice(source.batches(), 40), start=1):
            rollouts = taken(line)
            assert int((rollouts - 1) * STEPS * 0.75) < number <= int(rollouts * STEPS * 0.75)


def test_a_synchronous_source_prepares_nothing_ahead_of_the_priorities() -> None:
    """What a batch says of errors decides the very next one."""
    line = EndingLine(100)
    how = {"rate": 5.0, "priority_exponent": 1.0, "kind": SynchronousTransitions}
    with starting(line, **how) as (source, _):
        batches = source.batches()
        for _ in range(205):  # 40 updates a rollout: no new one comes next
            each = next(batches)
            each.give_feedback(Feedback(priorities=torch.zeros(SIZE)))
        favourite = each.observation[0, 0]
        sizes = torch.where(each.observation[:, 0] == favourite, 1e9, 0.0)
        each.give_feedback(Feedback(priorities=sizes))
        assert next(batches).observation[:, 0].eq(favourite).all()


def test_an_iterator_that_was_ended_from_outside_has_a_successor() -> None:
    line = EndingLine(30)
    with starting(line, rate=0.5, kind=SynchronousTransitions) as (source, _):
        first = source.batches()
        before = [next(first) for _ in range(5)]
        assert isinstance(first, Generator)
        first.close()
        after = list(source.batches())
    counted = [each.env_steps for each in before + after]
    assert sum(counted) == source._replay.inserted > 30 * STEPS
    assert len(counted) == int(sum(counted) * 0.5)


def test_closing_ends_a_synchronous_source_between_two_updates() -> None:
    with starting(EndingLine(30), rate=3.0, kind=SynchronousTransitions) as (source, _):
        batches = source.batches()
        next(batches)
        source.close()
        assert list(batches) == []


# --- free


def test_free_environments_and_a_free_learner_never_wait_for_each_other() -> None:
    line = Line([], 0, False)
    with starting(line, kind=FreeTransitions) as (source, _):
        wait_for(lambda: source._replay.inserted >= 50 * STEPS, SOON)  # nobody learns
        line.held.clear()  # nobody collects, once the present rollout is taken
        batches = source.batches()
        counted = sum(next(batches).env_steps for _ in range(500))
        wait_for(lambda: source._replay.inserted - counted <= STEPS, SOON)
        line.held.set()
    assert counted >= 50 * STEPS, "every step counts, most of them in the first update"


def test_a_free_learner_waits_for_learn_start_alone() -> None:
    line = Line([], 0, False)
    line.held.clear()
    with starting(line, learn_start=3 * STEPS, kind=FreeTransitions) as (source, _):
        waiting = Background(next, source.batches())
        line.held.set()
        assert waiting.result(SOON).env_steps >= 3 * STEPS
        line.held.clear()


def test_closing_wakes_a_free_learner_that_waits() -> None:
    line = Line([], 0, False)
    line.held.clear()
    with starting(line, kind=FreeTransitions) as (source, supervisor):
        waiting = Background(list, source.batches())
        source.close()
        assert waiting.result(SOON) == []
    assert supervisor.failure is None
