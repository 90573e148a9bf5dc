# SPDX-License-Identifier: Apache-2.0
"""Repeated operations leave nothing behind: no Python object, memory, thread or file."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import served_envs
import torch
from background import Background, wait_for
from served_envs import Counting, Vector
from serving import Game, playing, serving

from libtorchbeast import AsyncError, BatchingQueue, DynamicBatcher

MIB = 1 << 20


def growth(action: Callable[[], Any], times: int) -> int:
    """Returns the growth of the process in bytes over the second half of the repetitions."""
    process = psutil.Process()
    sizes = []
    for _ in range(2):
        for _ in range(times):
            action()
        gc.collect()
        sizes.append(process.memory_info().rss)
    return sizes[1] - sizes[0]


def python_objects(action: Callable[[], Any], times: int) -> int:
    """Returns the number of objects that the repetitions leave, except for the first few."""
    for _ in range(5):
        action()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(times):
        action()
    gc.collect()
    return len(gc.get_objects()) - before


def queue_and_batch() -> None:
    queue = BatchingQueue(minimum_batch_size=2)
    for _ in range(2):
        queue.enqueue(
            {"a": np.zeros((64, 1, 64)), "b": [torch.zeros(1, 1)]}, {"c": np.ones((1, 1))}
        )
    next(queue.with_info())


def batch_with_spare_columns() -> None:
    queue = BatchingQueue(minimum_batch_size=2, spare_columns=6)
    for _ in range(2):
        queue.enqueue(np.zeros((64, 1, 64)), {"c": np.ones((1, 1))})
    batch, _ = next(queue.with_info())
    batch[:, 2:] = 1


def refuse() -> None:
    queue = BatchingQueue()
    for bad in ((), np.zeros(3), {"a": object()}, {1: np.zeros((1, 1))}):
        with pytest.raises((ValueError, TypeError)):
            queue.enqueue(bad)


def unread_queue() -> None:
    queue = BatchingQueue()
    for _ in range(4):
        queue.enqueue(np.zeros((64, 1, 64)))
    queue.close()


def compute_and_answer() -> None:
    batcher = DynamicBatcher()
    caller = Background(batcher.compute, np.zeros((64, 1, 64)))
    batch = next(batcher)
    batch.set_outputs((batch.get_inputs(), ()))
    caller.result()


def compute_and_drop() -> None:
    batcher = DynamicBatcher()
    caller = Background(batcher.compute, np.zeros((64, 1, 64)))
    batch = next(batcher)
    del batch
    with pytest.raises(AsyncError):
        caller.result()


ACTIONS = [
    queue_and_batch,
    batch_with_spare_columns,
    refuse,
    unread_queue,
    compute_and_answer,
    compute_and_drop,
]


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_no_memory_is_left_behind_by(action: Callable[[], Any]) -> None:
    assert growth(action, 300) < 2 * MIB, "300 times 32 KiB or more would be 9 MiB"


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_no_python_object_is_left_behind_by(action: Callable[[], Any]) -> None:
    assert python_objects(action, 100) < 50


class Large(Vector):
    """Has observations of 64 KiB."""

    def observation(self) -> Any:
        return np.full((3, 64, 84, 4), self.time, np.uint8)


def test_memory_does_not_grow_during_a_long_run(address: str) -> None:
    with serving(Large, address), playing([address] * 2) as game:
        assert growth(lambda: game.rollouts(2), 100) < 8 * MIB, "a rollout has 320 KiB"


def test_a_long_run_leaves_no_python_object(address: str) -> None:
    with serving(Large, address), playing([address]) as game:
        assert python_objects(lambda: game.rollouts(2), 50) < 50


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_runs_leave_no_thread_and_no_open_file(address: str) -> None:
    def one_game() -> None:
        with serving(Counting, address), playing([address] * 2) as game:
            game.rollouts(2)

    for _ in range(3):
        one_game()
    files, threads = open_files(), threading.active_count()
    for _ in range(10):
        one_game()
    wait_for(lambda: open_files() <= files + 5)
    assert threading.active_count() == threads


def test_failing_runs_leave_no_environment(address: str) -> None:
    alive = []

    class Env(served_envs.Raising):
        def __init__(self) -> None:
            super().__init__()
            alive.append(1)

        def __del__(self) -> None:
            alive.pop()

    with serving(Env, address):
        for _ in range(10):
            game = Game([address])
            with pytest.raises(RuntimeError):
                game.end()
            game.close()
        wait_for(lambda: gc.collect() is not None and not alive)


def test_many_connections_leave_no_environment(address: str) -> None:
    with serving(served_envs.Recording, address):
        served_envs.Recording.forget()
        for _ in range(20):  # one stream each, because with two the other may not have begun
            with playing([address]) as game:
                game.rollout()
        wait_for(lambda: len(served_envs.Recording.closed) == 21)  # and the one that was described
        served_envs.Recording.forget()
    gc.collect()
    assert not [o for o in gc.get_objects() if type(o) is served_envs.Recording]
