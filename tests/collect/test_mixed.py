# SPDX-License-Identifier: Apache-2.0
"""New and replayed rollouts in one batch: how many, of what, in which order, until which end.

The online source here plays a line of numbers: of every row everything is known beforehand.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from assorted import check_rollout
from background import Background, wait_for
from compliance.source import copy_of
from shared_running import agent_of, joining, service_at

from torchbeast.collect.replay import Replay
from torchbeast.collect.replayed import MixedSource
from torchbeast.core.base.nest import map_leaves
from torchbeast.core.envs.spaces import ArraySpec
from torchbeast.core.storages.batch import Feedback
from torchbeast.core.storages.replay.rollout_replay import NO_ROLLOUT, ByPriority, RolloutReplay
from torchbeast.core.storages.rollout import Rollout
from torchbeast.fleets.supervisor import Supervisor

SOON = 30.0
T, B, SPARE = 4, 2, 5
LENGTH = 11  # of every episode; the second of two is truncated
STREAM = 10_000  # between the numbers of two environments' rows
GARBAGE = 77


# --- the line


def row(number: int) -> dict[str, Any]:
    """Row `number % STREAM` of environment `number // STREAM`, by the definition of the fields."""
    time = number % STREAM
    episode, step = divmod(time, LENGTH)
    is_last = step == 0 and time > 0
    step = LENGTH if is_last else step
    return {
        "observation": [float(number)],
        "reward": number % 7,
        "done": step == LENGTH or time == 0,
        "truncated": is_last and episode % 2 == 0,
        "episode_end": is_last,
        "episode_step": step,
        "episode_return": step,
        "action": number % 3,
        "policy_version": max(0, time - 1) // T,
    }


DTYPES = {
    "observation": torch.float32,
    "reward": torch.float32,
    "done": torch.bool,
    "truncated": torch.bool,
    "episode_end": torch.bool,
    "episode_step": torch.int32,
    "episode_return": torch.float32,
    "action": torch.int64,
    "policy_version": torch.int64,
}


def rows(numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """The fields [T+1, B, ...] of rows [T+1, B]."""
    each = [[row(int(number)) for number in line] for line in numbers]
    return {
        name: torch.tensor([[cell[name] for cell in line] for line in each]).to(dtype)
        for name, dtype in DTYPES.items()
    }


def final_of(number: float) -> list[float]:
    """The final observation of the truncation in a row."""
    return [-float(number)]


def batch(index: int, spare: int, is_recurrent: bool) -> Rollout:
    """Rollout `index` of both environments; in the spare columns is garbage."""
    line = torch.arange(T + 1)[:, None] + T * index + STREAM * torch.arange(B)
    fields = {name: _widened(leaf, spare) for name, leaf in rows(line).items()}
    truncated = fields["truncated"][1:, :B].T.nonzero()
    finals = [final_of(line[t + 1, b]) for b, t in truncated.tolist()]
    state = _widened(line[:1, :, None].float(), spare) if is_recurrent else ()
    return Rollout(
        **fields,
        extras={"policy_logits": _widened(line[:, :, None].repeat(1, 1, 3).float(), spare)},
        initial_agent_state=state,
        final_observation=torch.tensor(finals).reshape(-1, 1),
        env_index=_widened(torch.arange(B).repeat(T + 1, 1), spare),
        rollout_index=_widened(torch.full((T + 1, B), index), spare),
    )


def _widened(leaf: torch.Tensor, spare: int) -> torch.Tensor:
    garbage = torch.full((leaf.shape[0], spare, *leaf.shape[2:]), GARBAGE).to(leaf.dtype)
    return torch.cat([leaf, garbage], 1)


Event = tuple[str, int]  # what happened to which batch


class Line:
    """An online source that plays the line in the thread that asks."""

    num_bytes = 1000

    def __init__(self, events: list[Event], spare: int, is_recurrent: bool) -> None:
        self._events = events
        self._shape = spare, is_recurrent
        self._numbers = itertools.count()
        self._closed = threading.Event()
        self.held = threading.Event()  # cleared: it gives no further batch until it is closed
        self.held.set()
        self.fails_at: int | None = None

    def start(self, supervisor: Supervisor) -> None:
        supervisor.on_close(self.close)

    def batches(self) -> Iterator[Rollout]:
        while True:
            self.held.wait()
            if self._closed.is_set():
                return
            index = next(self._numbers)
            if index == self.fails_at:
                raise KeyError("the line is cut")
            self._events.append(("taken", index))
            try:
                yield batch(index, *self._shape)
            finally:
                self._events.append(("given back", index))

    def close(self) -> None:
        self._closed.set()
        self.held.set()

    def status(self) -> dict[str, float]:
        return {"learner_queue_size": 3, "live_workers": 1}

    def seconds(self) -> dict[str, float]:
        return {"environment": 1.0}

    def hanging(self) -> str:
        return "worker 5 hangs"

    def lost_streams(self) -> list[Any]:
        return []

    def set_env_options(self, options: Mapping[str, Any]) -> None:
        raise NotImplementedError


class Recorded:
    """A replay that tells what is done with it."""

    def __init__(self, replay: Replay, events: list[Event]) -> None:
        self._replay = replay
        self._events = events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replay, name)

    def insert(self, arrays: Any, *, priorities: Any) -> None:
        assert arrays["reward"].shape[1] == B
        self._replay.insert(arrays, priorities=priorities)
        self._events.append(("inserted", int(arrays["rollout_index"][0, 0])))


class Restarted(RolloutReplay):
    """A replay that is told once, before an insertion, that the environments were restarted."""

    restarts = False

    def insert(self, arrays: Any, agent: int = 0, *, priorities: Any = None) -> None:
        if self.restarts:
            self.new_source(agent)
            self.restarts = False
        super().insert(arrays, agent)


def specs(is_recurrent: bool) -> dict[str, Any]:
    return {
        name: map_leaves(
            lambda leaf: ArraySpec(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")), nest
        )
        for name, nest in batch(0, 0, is_recurrent).tensors().items()
    }


@dataclasses.dataclass
class Started:
    source: MixedSource
    online: Line
    replay: Recorded
    supervisor: Supervisor
    events: list[Event]

    def happened(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event[0] in kinds]


Make = Callable[..., AbstractContextManager[Replay]]
"""Makes a replay of specs, a capacity, a seed, spare columns, and ByPriority or None."""
Start = Callable[..., AbstractContextManager[Started]]


@contextmanager
def own(
    specs: dict[str, Any], capacity: int, seed: int, spare: int, sampling: ByPriority | None
) -> Iterator[Replay]:
    yield RolloutReplay(specs, capacity, 1, seed, sampling)


@pytest.fixture(params=["own", "shared"])
def started(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Starts a source with the run's own replay, and with a shared one that it has for itself."""
    numbers = itertools.count()

    @contextmanager
    def shared(
        specs: dict[str, Any], capacity: int, seed: int, spare: int, sampling: Any
    ) -> Iterator[Replay]:
        path = tmp_path / f"{next(numbers)}.sock"
        assert sampling is None, "nobody shares a replay that samples by priority"
        how = joining(specs, B, spare, replay_size=capacity, seed=seed)
        with service_at(path), agent_of(path, how) as agent:
            yield agent

    return functools.partial(starting, own if request.param == "own" else shared)


@contextmanager
def starting(
    make: Make,
    learner_threads: int = 1,
    is_recurrent: bool = False,
    learn_start: int = 0,
    capacity: int = 2000,
    spare: int = SPARE,
    seed: int = 0,
    sampling: ByPriority | None = None,
) -> Iterator[Started]:
    events: list[Event] = []
    online = Line(events, spare, is_recurrent)
    with make(specs(is_recurrent), capacity, seed, spare, sampling) as made:
        replay = Recorded(made, events)
        source = MixedSource(
            online,
            replay,
            batch_size=B,
            spare_columns=spare,
            learn_start=learn_start,
            in_flight=learner_threads + 1,
            initial_state=torch.zeros(1, 1, 1) if is_recurrent else (),
            beta=None if sampling is None else 0.5,
        )
        supervisor = Supervisor()
        try:
            source.start(supervisor)
            yield Started(source, online, replay, supervisor, events)
        finally:
            supervisor.stop("the test ended")
            assert supervisor.join(SOON) == []


def number_of(rollout: Rollout) -> int:
    return int(rollout.rollout_index[0, 0])


def learn(run: Started, count: int, may_end: bool = False) -> list[Rollout]:
    """Takes batches, remembers what the next walks must start with, and tells when it is done."""
    found = []
    for rollout in run.source.batches():
        found.append(copy_of(rollout))
        if rollout.feeds_back:
            rollout.give_feedback(Feedback(final_state=rollout.observation[-1:].clone()))
        run.events.append(("learnt", number_of(rollout)))
        if len(found) == count:
            return found
    assert may_end, run.supervisor.failure
    return found


# --- what is in a batch


def test_every_batch_has_the_ratio_once_something_can_be_replayed(started: Start) -> None:
    with started() as run:
        rollouts = learn(run, 12)
    sizes = [rollout.batch_size for rollout in rollouts]
    # The first episode ends in row 11, of rollout 2; it is inserted before batch 2 + 2.
    assert sizes == [B] * 4 + [B + SPARE] * 8
    for rollout in rollouts[4:]:
        check_rollout(rollout)
        assert rollout.replayed is not None
        assert rollout.replayed.tolist() == [[False] * B + [True] * SPARE] * (T + 1)


def test_before_learn_start_batches_are_new_alone(started: Start) -> None:
    with started(learn_start=8 * T * B) as run:
        rollouts = learn(run, 12)
    assert [rollout.batch_size for rollout in rollouts] == [B] * 9 + [B + SPARE] * 3


def test_learn_start_is_reached_once() -> None:
    """A restarted environment's row 0 takes room: the replay then holds fewer steps than before."""
    full = 30 * T * B
    stored = Restarted(specs(is_recurrent=False), full)
    with starting(lambda *_: nullcontext(stored), learn_start=full) as run:
        assert learn(run, 40)[-1].replayed is not None
        stored.restarts = True
        rollouts = learn(run, 6)
        assert not stored.restarts and stored.size < full
    assert [rollout.batch_size for rollout in rollouts] == [B + SPARE] * 6


def test_the_priorities_of_an_update_decide_what_is_replayed() -> None:
    """Only windows of environment 1 have an error, new ones at first and replayed ones later."""
    with starting(own, sampling=ByPriority(1.0, 2)) as run:
        rollouts, names = [], []
        for rollout in itertools.islice(run.source.batches(), 40):
            rollouts.append(copy_of(rollout))
            errors = (rollout.env_index[0] == 1).float()
            rollout.give_feedback(Feedback(priorities=errors))
            run.events.append(("learnt", number_of(rollout)))
            names.append(rollout.observation[0, B:, 0])
    assert [rollout.batch_size for rollout in rollouts] == [B] * 2 + [B + SPARE] * 38
    for rollout in rollouts[2:]:
        check_rollout(rollout)
        assert rollout.env_index[0, B:].tolist() == [1] * SPARE
        weights = rollout.weights
        assert weights is not None and (weights == weights[:1]).all()
        assert weights[0, :B].tolist() == [1.0] * B
    half = [2.0**-0.5] * SPARE  # of all windows
    assert weights[0, B:].tolist() == pytest.approx(half, rel=0.05)
    assert len({*torch.cat(names).tolist()}) > 20
    assert all(not rollout.feeds_back for rollout in rollouts)


def test_an_update_without_priorities_fails_the_run() -> None:
    with starting(own, sampling=ByPriority(1.0, 2)) as run:
        for _ in run.source.batches():
            pass
    assert "did not return priorities" in str(run.supervisor.failure)


def test_new_columns_are_those_of_the_online_source(started: Start) -> None:
    with started() as run:
        rollouts = learn(run, 12)
    for index, rollout in enumerate(rollouts):
        expected = batch(index, 0, False)
        mine = rollout.columns(0, B)
        for name in (*DTYPES, "env_index", "rollout_index", "final_observation"):
            assert torch.equal(getattr(mine, name), getattr(expected, name)), name
        assert torch.equal(mine.extras["policy_logits"], expected.extras["policy_logits"])


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_replayed_columns_are_true_rows_of_batches_that_were_inserted(
    started: Start, is_recurrent: bool
) -> None:
    seen = set()
    with started(is_recurrent=is_recurrent) as run:
        rollouts = learn(run, 40)
    for index, rollout in enumerate(rollouts[4:], start=4):
        numbers = rollout.observation[:, B:, 0].long()
        assert (numbers.diff(dim=0) == 1).all(), "no row twice, none left out"
        assert (numbers % STREAM).max() <= T * (index - 1), "batch index - 2 is inserted"
        for name, expected in rows(numbers).items():
            assert torch.equal(getattr(rollout, name)[:, B:], expected), name
        logits = numbers[:, :, None].repeat(1, 1, 3).float()
        assert torch.equal(rollout.extras["policy_logits"][1:, B:], logits[1:])
        assert torch.equal(rollout.env_index[:, B:], numbers // STREAM)
        assert rollout.rollout_index[:, B:].eq(NO_ROLLOUT).all()
        seen.update(numbers.flatten().tolist())
    assert len(seen) > 100


def test_final_observations_follow_their_columns(started: Start) -> None:
    replayed = 0
    with started() as run:
        for rollout in learn(run, 40)[4:]:
            where = zip(*rollout.truncations(), strict=True)
            expected = [final_of(rollout.observation[t, b, 0]) for t, b in where]
            assert rollout.final_observation.tolist() == expected
            replayed += int(rollout.truncated[1:, B:].sum())
    assert replayed > 10


def test_only_new_steps_count_as_collected(started: Start) -> None:
    with started() as run:
        rollouts = learn(run, 12)
    assert [rollout.env_steps for rollout in rollouts] == [T * B] * 12
    assert rollouts[-1].num_steps == T * (B + SPARE)
    lengths = [length for rollout in rollouts for length in rollout.finished_episodes()[1]]
    assert len(lengths) == B * (12 * T // LENGTH), "each game once"


# --- who comes first


def test_a_batch_is_inserted_when_it_is_learnt_and_before_the_next_but_one(started: Start) -> None:
    with started() as run:
        learn(run, 10)
        mine = run.happened("taken", "inserted")
    expected = [("taken", 0)]
    for k in range(1, 10):
        expected += [("taken", k), ("inserted", k - 1)]
    assert mine[: len(expected) - 1] == expected[:-1]
    for k in range(8):
        order = [run.events.index((kind, k)) for kind in ("taken", "learnt", "inserted")]
        assert order == sorted(order)
        assert run.events.index(("given back", k)) > run.events.index(("inserted", k))


def test_with_two_learner_threads_batches_are_inserted_in_order(started: Start) -> None:
    """Batch 1 is learnt before batch 0: neither may be inserted yet."""
    with started(learner_threads=2) as run:
        slow, fast = run.source.batches(), run.source.batches()
        assert number_of(next(slow)) == 0 and number_of(next(fast)) == 1
        assert number_of(next(fast)) == 2
        assert run.happened("inserted") == []
        assert number_of(next(slow)) == 3
        wait_for(lambda: ("inserted", 0) in run.events)
        mine = run.happened("taken", "inserted")[3:]
    order = [("inserted", 0), ("taken", 3), ("inserted", 1), ("taken", 4)]
    assert mine and mine == order[: len(mine)]


def test_what_is_replayed_does_not_depend_on_the_learners_speed(started: Start) -> None:
    def replayed(is_slow: bool) -> list[torch.Tensor]:
        found = []
        with started(seed=3) as run:
            for rollout in itertools.islice(run.source.batches(), 20):
                found.append(rollout.observation.clone())
                last = number_of(rollout)
                if is_slow:  # the next batch is there before this one is learnt
                    wait_for(lambda last=last: ("taken", last + 1) in run.events)
                else:
                    run.events.append(("learnt", last))
        return found

    fast, slow = replayed(is_slow=False), replayed(is_slow=True)
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))
    with started(seed=4) as run:
        other = [rollout.observation for rollout in learn(run, 20)]
    assert not all(torch.equal(a, b) for a, b in zip(fast, other, strict=True))


# --- recurrent state


@pytest.mark.parametrize("learner_threads", [1, 2])
def test_a_window_starts_with_the_state_after_the_one_before_it(
    started: Start, learner_threads: int
) -> None:
    """The state that is learnt is the observation of the row to which it belongs."""
    with started(learner_threads, is_recurrent=True) as run:
        learning = [Background(learn, run, 30) for _ in range(learner_threads)]
        rollouts = [rollout for thread in learning for rollout in thread.result()]
    fed_back = 0
    for rollout in rollouts:
        states, first = rollout.initial_agent_state[0, :, 0], rollout.observation[0, :, 0]
        for column in range(B, rollout.batch_size):
            if rollout.done[0, column]:
                assert states[column] == 0
            else:
                assert states[column] == first[column]
                fed_back += 1
        assert torch.equal(states[:B], first[:B]), "the online source's own"
    assert fed_back > 50


def test_an_algorithm_that_returns_no_state_ends_the_run(started: Start) -> None:
    with started(is_recurrent=True) as run:
        assert len(list(run.source.batches())) > 1
        wait_for(lambda: run.supervisor.ended)
    assert "did not return final_state for a batch" in str(run.supervisor.failure)


def test_every_walk_goes_through_whole_episodes(started: Start) -> None:
    with started(is_recurrent=True) as run:
        rollouts = [rollout for rollout in learn(run, 40) if rollout.replayed is not None]
    for lane in (rollouts[::2], rollouts[1::2]):
        for column in range(B, B + SPARE):
            starts = [int(rollout.observation[0, column, 0]) for rollout in lane]
            assert starts[0] % STREAM % LENGTH == 0
            for before, after in itertools.pairwise(starts):
                goes_on = before % STREAM % LENGTH + T < LENGTH
                assert after == before + T if goes_on else after % STREAM % LENGTH == 0


def test_a_network_without_memory_is_asked_for_no_state(started: Start) -> None:
    with started() as run:
        assert not any(rollout.feeds_back for rollout in learn(run, 8))


# --- endings


def test_closing_wakes_whoever_waits_for_a_batch(started: Start) -> None:
    with started() as run:
        run.online.held.clear()
        waiting = [Background(learn, run, 100, True) for _ in range(2)]
        run.source.close()
        run.source.close()  # a second time is fine
        for waiter in waiting:
            assert len(waiter.result()) < 100
    assert run.supervisor.failure is None


def test_closing_wakes_the_replay_thread_that_waits_for_the_learner(started: Start) -> None:
    with started() as run:
        batches = run.source.batches()
        next(batches)
        wait_for(lambda: ("taken", 1) in run.events)
        run.source.close()
        assert run.supervisor.join(SOON) == []
        assert run.happened("inserted") == [], "what was not learnt is not inserted"


def test_a_batch_is_not_given_back_while_it_is_learnt(started: Start) -> None:
    """Even at the end: the online source would overwrite it."""
    with started() as run:
        batches = run.source.batches()
        next(batches)
        run.source.close()
        assert run.supervisor.join(SOON) == []
        assert run.happened("given back") == []


def test_an_online_source_that_fails_ends_the_run_and_the_learner(started: Start) -> None:
    with started() as run:
        run.online.fails_at = 6
        assert len(learn(run, 100, may_end=True)) == 6
        wait_for(lambda: run.supervisor.ended)
        assert run.supervisor.join(SOON) == []
    assert "the line is cut" in str(run.supervisor.failure)


def test_a_rollout_that_cannot_be_stored_ends_the_run_with_the_reason(started: Start) -> None:
    with started() as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.replay, "insert", _refuse)
        learn(run, 100, may_end=True)
        wait_for(lambda: run.supervisor.ended)
    failure = run.supervisor.failure
    assert failure is not None and failure.origin == "replay"
    assert "these are no stacks" in str(failure)


def _refuse(*_: Any, **__: Any) -> None:
    raise ValueError("these are no stacks")


def test_a_learner_that_fails_ends_the_replay_thread(started: Start) -> None:
    with started() as run:

        def fail() -> None:
            for _ in run.source.batches():
                raise ArithmeticError("the loss is nan")

        run.supervisor.start_thread("learner-0", fail)
        wait_for(lambda: run.supervisor.ended)
        assert run.supervisor.join(SOON) == []
    assert "the loss is nan" in str(run.supervisor.failure)


def test_what_a_learner_leaves_unlearnt_is_not_inserted(started: Start) -> None:
    with started() as run:
        next(run.source.batches())  # its iterator is left at once
        learn(run, 4)
        wait_for(lambda: ("taken", 5) in run.events)
    assert [index for _, index in run.happened("inserted")][:3] == [1, 2, 3]


# --- what it says of itself


def test_it_tells_what_the_online_source_tells_and_how_full_the_replay_is(started: Start) -> None:
    with started(capacity=100, spare=2) as run:
        learn(run, 30)
        # It was left with batch 29, which is not inserted; the next two are ready.
        wait_for(lambda: run.source.status()["learner_queue_size"] == 3 + 2 * B)
        status = run.source.status()
        assert status["live_workers"] == 1 and status["replay_fill"] == 1.0
        assert run.happened("inserted")[-1] == ("inserted", 28)
        read = 32 - 4  # prepared batches, less those that were new alone
        assert status["samples_per_insert"] == pytest.approx(read * 2 / (29 * B), abs=1e-4)
        assert run.source.seconds() == {"environment": 1.0}
        assert run.source.hanging() == "worker 5 hangs" and run.source.lost_streams() == []


@pytest.mark.parametrize(
    ("capacity", "sampling", "lacks"),
    [(4 * T, None, "episode"), (B * T, ByPriority(1.0, 2), "window")],
)
def test_a_replay_without_room_for_what_it_samples_is_told_once(
    caplog: pytest.LogCaptureFixture, capacity: int, sampling: ByPriority | None, lacks: str
) -> None:
    caplog.set_level(logging.WARNING, "torchbeast.replay")
    with starting(own, capacity=capacity, sampling=sampling) as run:
        for rollout in itertools.islice(run.source.batches(), 20):
            priorities = None if sampling is None else torch.ones(rollout.batch_size)
            rollout.give_feedback(Feedback(priorities=priorities))
    assert rollout.batch_size == B
    told = [record for record in caplog.records if record.name == "torchbeast.replay"]
    (said,) = [record.getMessage() for record in told]
    assert f"does not hold a complete {lacks}," in said and "replay_size" in said


class Blocking(io.BytesIO):
    """A file whose first write lasts until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_written_to, self.released = threading.Event(), threading.Event()

    def write(self, data: Any) -> int:
        self.is_written_to.set()
        assert self.released.wait(SOON)
        return super().write(data)


def test_the_replay_is_saved_while_no_batch_changes_it() -> None:
    file = Blocking()
    with starting(own) as run:
        learn(run, 20)
        ready = 3 + 2 * B  # of the online source, and batches 20 and 21: now all wait
        wait_for(lambda: run.source.status()["learner_queue_size"] == ready)
        store = run.replay._replay
        assert isinstance(store, RolloutReplay)

        def save() -> None:
            with store.lock:  # as a checkpoint does
                store.save(file)

        saving = Background(save)
        assert file.is_written_to.wait(SOON)
        size, inserted = run.replay.stats().size, run.happened("inserted")
        learning = Background(learn, run, 4)
        wait_for(lambda: ("learnt", 21) in run.events)
        with pytest.raises(AssertionError, match="did not end"):
            learning.result(timeout=1.0)  # batch 22 is prepared after an insertion
        assert run.happened("inserted") == inserted
        file.released.set()
        saving.result()
        learning.result()
        assert len(run.happened("inserted")) > len(inserted)
    again = RolloutReplay(specs(False), 2000)
    file.seek(0)
    again.load(file)
    assert again.size == size and again.stats().episodes > 0
