# SPDX-License-Identifier: Apache-2.0
"""A host that dials learners: how often, until when, and what ends it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from torchbeast.errors import RunError
from torchbeast.servers import joining
from torchbeast.servers.config import SecurityConfig
from torchbeast.servers.joining import JoiningStreams

Outcome = Exception | str  # what play() raises; else "taken" and then lost, or "ended"


class Learner:
    """In place of libtorchbeast.Host: what happens to one attempt after the other."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = iter(outcomes)
        self.attempts: list[str] = []

    def __call__(self, make: Any, address: str, **_: Any) -> Learner:
        self.attempts.append(address)
        return self

    def play(self, timeout_s: float, on_taken: Callable[[], None]) -> None:
        match next(self.outcomes):
            case Exception() as error:
                raise error
            case "taken":
                on_taken()
                raise ConnectionError("connection lost")

    def stop(self) -> None:
        pass


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(
    monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> Callable[..., tuple[Learner, JoiningStreams]]:
    def make(
        *outcomes: Outcome, explained: Exception | None = None
    ) -> tuple[Learner, JoiningStreams]:
        learner = Learner(*outcomes)

        def explain(*_: Any) -> None:
            if explained is not None:
                raise explained

        monkeypatch.setattr("libtorchbeast.Host", learner)
        monkeypatch.setattr(joining, "explain", explain)
        monkeypatch.setattr(joining, "_FIRST_PAUSE_S", 0.0)
        streams = JoiningStreams(
            lambda: None,
            {},
            ["a:1"],
            SecurityConfig(insecure=True),
            lambda report: said.append(report["said"]),
        )
        streams.dial()
        return learner, streams

    return make


AWAY = ConnectionError("no learner answers at a:1")


def test_a_host_dials_until_the_run_has_ended(start: Any, said: list[str]) -> None:
    learner, streams = start(AWAY, AWAY, "taken", AWAY, "ended")
    assert streams.run()
    assert learner.attempts == ["a:1"] * 5
    assert said[0] == "no learner answers at a:1; reconnecting."
    assert said[2:4] == ["Connected to the learner at a:1.", "connection lost; reconnecting."]


def test_pauses_grow_at_random_until_a_learner_takes_the_stream(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, streams = start(*[AWAY] * 9, "taken", AWAY, "ended")
    monkeypatch.setattr(joining, "_FIRST_PAUSE_S", 0.1)
    paused: list[float] = []
    monkeypatch.setattr(streams._stopped, "wait", paused.append)
    assert streams.run()
    wanted = [min(0.1 * 2**n, 10.0) for n in range(9)] + [0.1, 0.2]
    assert all(w / 2 <= p <= w for p, w in zip(paused, wanted, strict=True))
    assert len({p / w for p, w in zip(paused, wanted, strict=True)}) > 5


def test_a_host_says_why_it_cannot_join_and_dials_on(start: Any, said: list[str]) -> None:
    _, streams = start(
        "taken", PermissionError("not its token"), ValueError("no learner listens there"), "ended"
    )
    assert streams.run()
    assert said[2:] == ["not its token; reconnecting.", "no learner listens there; reconnecting."]
    _, streams = start(AWAY, "ended", explained=RunError("its certificate has expired"))
    assert streams.run()
    assert said[4:] == ["its certificate has expired; reconnecting."]


def test_environments_that_fail_too_often_end_the_host(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, streams = start(*[RuntimeError("a traceback")] * 5)
    with pytest.raises(RunError, match="failure 5 within ten minutes: a traceback"):
        streams.run()
    assert len(learner.attempts) == 5
    clock = map(float, itertools.count(0, 200)).__next__
    monkeypatch.setattr("time.monotonic", clock)
    _, streams = start(*[RuntimeError("a traceback")] * 9, "ended")
    assert streams.run(), "now and then is not too often"


def test_a_host_that_is_stopped_ends_without_an_error(start: Any) -> None:
    _, streams = start()
    streams.stop()
    assert not streams.run()
