# SPDX-License-Identifier: Apache-2.0
"""BatchTaker gives every batch once, also to a thread that Ctrl-C interrupts at any moment."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from background import SOON, Background

from torchbeast.collect.batch_taker import BatchTaker


def test_an_interrupt_loses_no_batch_even_as_the_wait_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, interrupts = threading.Semaphore(0), ["as the wait for batch 2 returns", "of batch 1"]

    class Interrupted(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            if is_main:
                waits.release()
            item = super().get(block, timeout)
            if is_main and interrupts:
                raise KeyboardInterrupt(interrupts.pop())
            return item

    def batches() -> Iterator[int]:
        for number in (1, 2, 3):
            assert waits.acquire(timeout=SOON)  # until the main thread waits for it
            yield number

    monkeypatch.setattr(queue, "SimpleQueue", Interrupted)
    taking = BatchTaker(batches)
    thread = Background(taking.run)
    for number in (1, 2):
        taking.ask(number)
        with pytest.raises(KeyboardInterrupt):
            taking.wait(number, SOON)
        taking.ask(number)  # as the next step does
        assert taking.wait(number, SOON) == number
    taking.ask(3)
    assert taking.wait(3, SOON) == 3
    taking.close()
    thread.result()


def test_a_batch_that_is_asked_for_again_is_not_given_back() -> None:
    given_back: list[int] = []

    def batches() -> Iterator[int]:
        for number in (1, 2):
            yield number
            given_back.append(number)

    taking = BatchTaker(batches)
    thread = Background(taking.run)
    for _ in range(2):  # an interrupt may come between the request and its caller's note of it
        taking.ask(1)
    assert taking.wait(1, SOON) == 1 and given_back == []
    taking.ask(2)
    assert taking.wait(2, SOON) == 2 and given_back == [1]
    taking.close()
    thread.result()
    assert taking.wait(3, SOON) is None, "nobody waits for a batch that never comes"
