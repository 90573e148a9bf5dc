# SPDX-License-Identifier: Apache-2.0
"""Learners that agree before each update, as threads that meet at a barrier."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from background import Background, wait_for
from test_training import Run, rollout

from torchbeast.collect.contract import LostStream, TooFewStreams
from torchbeast.collect.joint import BatchReport, JointBatch
from torchbeast.core.storages.rollout import Rollout
from torchbeast.core.update.torch_ranks import RankGone
from torchbeast.errors import RunError
from torchbeast.fleets.supervisor import Supervisor
from torchbeast.run import replicas
from torchbeast.run.replicas import RankedLearner
from torchbeast.run.training import DONE, ENOUGH

SOON = 20.0


class Meeting:
    """Gathers the messages of two threads, in JSON as real ranks do; `leave` ends it for both."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=SOON)
        self._messages: list[str] = ["", ""]
        self.calls = 0
        self.adds: dict[str, Any] = {}  # to the message of rank 0

    def gather_as(self, rank: int) -> Any:
        def gather(message: dict[str, Any]) -> list[dict[str, Any]]:
            try:
                self._messages[rank] = json.dumps(message | (self.adds if rank == 0 else {}))
                self._barrier.wait()
                found = [json.loads(text) for text in self._messages]
                self.calls += not rank
                self._barrier.wait()
            except threading.BrokenBarrierError:
                raise RankGone("another learner has ended. rank 1: it broke") from None
            return found

        return gather

    def leave(self) -> None:
        self._barrier.abort()


class FedSource:
    """Yields what the test puts into `given`, until it is closed."""

    num_bytes = 0

    def __init__(self, rank: int) -> None:
        self.given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._rank = rank

    def start(self, supervisor: Supervisor) -> None:
        supervisor.on_close(lambda: self.given.put(None))

    def batches(self) -> Iterator[Rollout]:
        while (batch := self.given.get()) is not None:
            yield batch

    def status(self) -> dict[str, float]:
        return {"collected_steps": 10.0 + self._rank}

    def seconds(self) -> dict[str, float]:
        return {"environment": 1.0, "inference": 2.0, "queueing": 3.0}

    def hanging(self) -> str:
        return f"a stream of {self._rank} hangs"

    def set_env_options(self, options: Any) -> None:
        self.env_options = options

    def lost_streams(self) -> list[LostStream]:
        short = TooFewStreams(0, 1, 55.0) if self._rank else None
        return [LostStream(f"server {self._rank}", 5.0, short, f"refused {self._rank}")]


class Member:
    """One of two ranks."""

    version, algo = 3, None

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.supervisor = Supervisor()
        self.fed = FedSource(rank)
        ranks = SimpleNamespace(gather=meeting.gather_as(rank))
        replica: Any = SimpleNamespace(rank=rank, ranks=ranks, meet=lambda *_: None)
        step: Any = self
        self.source = RankedLearner(self.fed, replica, step)
        self.source.start(self.supervisor)
        self.batches = self.source.batches()

    def next(self) -> Background[Any]:
        return Background(next, self.batches, None)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    monkeypatch.setattr(replicas, "PATIENCE_S", 0.01)
    return Meeting()


def test_after_the_last_step_a_signal_ends_the_wait_for_rank_0(meeting: Meeting) -> None:
    member, seen = Member(1, meeting), []

    def meet(_: int, has_ended: Callable[[], bool]) -> None:
        seen.append(has_ended())
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(has_ended())
        raise RankGone("it has ended")

    member.source._replica.meet = meet  # type: ignore[method-assign]
    member.supervisor.stop(DONE)
    with member.supervisor.signals():
        assert next(member.batches, None) is None
    assert seen == [False, True]


@pytest.fixture
def members(meeting: Meeting) -> Iterator[list[Member]]:
    made = [Member(rank, meeting) for rank in range(2)]
    yield made
    meeting.leave()
    for member in made:
        member.supervisor.stop("the test ends")
        assert member.supervisor.join(SOON) == []


def test_no_rank_learns_before_all_have_a_batch_and_the_late_one_is_named(
    members: list[Member], meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank without a batch answers the roll calls of the other."""
    monkeypatch.setattr(replicas, "WAIT_S", 0.0)
    members[0].fed.given.put(rollout())
    waiting = [member.next() for member in members]
    wait_for(lambda: meeting.calls > 5)
    assert not any(each.ended for each in waiting)
    wait_for(lambda: "wait for a batch of rank 1" in members[0].source.hanging())
    members[1].fed.given.put(rollout())
    assert all(isinstance(each.result(), JointBatch) for each in waiting)


def test_the_next_batch_is_taken_after_the_update(members: list[Member]) -> None:
    """A source reuses the memory of a batch once it is asked for the next."""
    for member in members:
        member.fed.given.put(rollout())
        member.fed.given.put(rollout())
    for each in [member.next() for member in members]:
        each.result()
    assert [member.fed.given.qsize() for member in members] == [1, 1]


@pytest.mark.parametrize("reason", ["SIGTERM", DONE])
def test_all_ranks_end_after_the_same_update_when_one_ends(
    members: list[Member], reason: str
) -> None:
    """Rank 0 has its next batch already, and rank 1 ends."""
    for member in members:
        member.fed.given.put(rollout())
    for each in [member.next() for member in members]:
        each.result()
    members[0].fed.given.put(rollout())
    waiting = [member.next() for member in members]
    members[1].supervisor.stop(reason)
    assert [each.result() for each in waiting] == [None, None]
    assert members[0].supervisor.reason == f"{reason} in rank 1"
    assert members[1].supervisor.reason == reason
    assert not any(member.supervisor.failure for member in members)


def test_a_rank_that_fails_leaves_and_the_others_fail_with_its_reason(
    members: list[Member], meeting: Meeting
) -> None:
    waiting = [member.next() for member in members]
    members[1].supervisor.fail("environments", RuntimeError("it broke"))
    assert waiting[1].result() is None
    meeting.leave()  # as the end of its program does
    assert waiting[0].result() is None
    failure = members[0].supervisor.failure
    assert failure and str(failure) == "another learner has ended. rank 1: it broke"


def test_a_lost_rank_is_the_failure_even_of_a_run_that_a_signal_ends(
    members: list[Member], meeting: Meeting
) -> None:
    """torchrun ends the others with SIGTERM when one is killed."""
    meeting.leave()
    members[0].supervisor.stop("SIGTERM")
    assert members[0].next().result() is None
    assert members[0].supervisor.failure and not members[1].supervisor.ended


def test_figures_are_those_of_all_ranks(members: list[Member]) -> None:
    """In the batch of rank 1 the weights of each action are two versions old, not three."""
    second = rollout()
    second.policy_version.fill_(1)
    for member, batch in zip(members, [rollout(), second], strict=True):
        member.fed.given.put(batch)
    for member, each in zip(members, [member.next() for member in members], strict=True):
        batch = each.result()
        assert batch.lags(3) == {"mean_lag": 2.5, "max_lag": 3.0}
        assert batch.env_steps == 2 * rollout().env_steps
        assert batch.finished_episodes() == ([7.0, 7.0], [4, 4])
        assert member.source.status() == {"collected_steps": 21.0}
        assert member.source.seconds() == {"environment": 2.0, "inference": 4.0, "queueing": 6.0}
    assert members[0].source.hanging() == "a stream of 0 hangs; rank 1: a stream of 1 hangs"
    short = TooFewStreams(0, 1, 55.0, " of rank 1")
    for member, order in zip(members, ([0, 1], [1, 0]), strict=True):
        lost_streams = [
            LostStream("server 0", 5.0, None, "refused 0"),
            LostStream("server 1", 5.0, short, "refused 1"),
        ]
        assert member.source.lost_streams() == [lost_streams[rank] for rank in order]


def test_where_a_callback_stops_rank_0_the_others_know_that_the_run_is_over(
    members: list[Member],
) -> None:
    for member in members:
        member.fed.given.put(rollout())
    for each in [member.next() for member in members]:
        each.result()
    waiting = [member.next() for member in members]
    members[0].supervisor.stop(ENOUGH)
    assert [each.result() for each in waiting] == [None, None]
    assert [member.supervisor.reason for member in members] == [ENOUGH] * 2


def test_options_of_rank_0_reach_the_environments_of_all(members: list[Member]) -> None:
    members[0].source.set_env_options({"level": 3})
    for member in members:
        member.fed.given.put(rollout())
    for each in [member.next() for member in members]:
        each.result()
    assert [member.fed.env_options for member in members] == [{"level": 3}] * 2


def test_a_report_of_another_version_ends_the_run_with_the_rank_and_the_reason(
    members: list[Member], meeting: Meeting
) -> None:
    meeting.adds = {"mood": "good"}
    waiting = [member.next() for member in members]
    for each in waiting:
        with pytest.raises(RunError, match=r"rank 0 .*mood.*start all learners with the same"):
            each.result()


def test_lags_are_weighted_by_steps() -> None:
    report = BatchReport({}, {}, ready=True)
    few = report._replace(env_steps=1, lags={"mean_lag": 9.0, "max_lag": 9.0})
    many = report._replace(env_steps=3, lags={"mean_lag": 1.0, "max_lag": 2.0})
    lags = JointBatch([few, many]).lags(0)
    assert lags == {"mean_lag": 3.0, "max_lag": 9.0}
    assert JointBatch([report]).lags(0) == {}
    older = many._replace(version=-2)  # whose lags are behind that version
    assert JointBatch([few, older]).lags(0) == {"mean_lag": 4.5, "max_lag": 9.0}


@pytest.mark.parametrize("learns_all", [False, True])
def test_a_rank_learns_from_what_was_agreed_even_if_its_run_ends_meanwhile(
    tmp_path: Path, learns_all: bool
) -> None:
    run = Run(tmp_path, [rollout()], total_steps=1000, learns_all=learns_all)
    run.supervisor.stop("SIGTERM")
    run.learn()
    assert run.training.updates == learns_all
