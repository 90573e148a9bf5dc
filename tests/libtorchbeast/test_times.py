# SPDX-License-Identifier: Apache-2.0
"""Times that are given as numbers: invalid ones are refused, very long ones do not overflow."""

from __future__ import annotations

import math

import pytest
import torch
from background import Background
from served_envs import Counting
from serving import Game, serving

from libtorchbeast import ActorPool, BatchingQueue, DynamicBatcher, Server, describe

NO_TIME = [math.nan, -1.0, -math.inf]
FOR_EVER = [math.inf, 1e300, 1e18]


@pytest.mark.parametrize("seconds", NO_TIME)
@pytest.mark.parametrize("name", ["connect_timeout_s", "step_timeout_s", "reconnect_timeout_s"])
def test_a_pool_refuses_invalid_times(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=str(seconds).split(".")[0]):
        ActorPool(1, BatchingQueue(), DynamicBatcher(), ["unix:/nobody"], (), **{name: seconds})


@pytest.mark.parametrize("seconds", NO_TIME)
def test_waiting_for_a_server_refuses_invalid_times(seconds: float, address: str) -> None:
    with pytest.raises(ValueError, match=str(seconds).split(".")[0]):
        Server(Counting, address).wait_until_serving(seconds)
    with pytest.raises(ValueError, match=str(seconds).split(".")[0]):
        describe(address, seconds)


@pytest.mark.parametrize("make", [BatchingQueue, DynamicBatcher])
def test_queues_refuse_a_negative_timeout(make: type) -> None:
    with pytest.raises(ValueError, match="-1"):
        make(timeout_ms=-1)


@pytest.mark.parametrize("seconds", FOR_EVER)
def test_very_long_times_do_not_overflow(seconds: float, address: str) -> None:
    server = Server(Counting, address)
    waiting = Background(server.wait_until_serving, seconds)
    times = dict.fromkeys(["connect_timeout_s", "step_timeout_s", "reconnect_timeout_s"], seconds)
    game = Game([address], **times)
    run = Background(server.run)
    assert waiting.result() is True
    assert describe(address, seconds)["num_envs"] == 1
    game.rollouts(3)
    game.close()
    game.end()
    server.stop()
    run.result()


@pytest.mark.parametrize("timeout_ms", [2**62, 2**63 - 1])
def test_a_very_long_timeout_of_a_queue_does_not_overflow(timeout_ms: int) -> None:
    queue = BatchingQueue(minimum_batch_size=2, timeout_ms=timeout_ms)
    queue.enqueue(torch.zeros(1, 1))
    consumer = Background(next, queue)
    queue.enqueue(torch.ones(1, 1))
    assert consumer.result().shape == (1, 2)


def test_a_timeout_of_zero_does_not_wait(address: str) -> None:
    queue = BatchingQueue(minimum_batch_size=2, timeout_ms=0)
    queue.enqueue(torch.zeros(1, 1))
    assert next(queue).shape == (1, 1)
    with serving(Counting, address) as server:
        assert server.wait_until_serving(0) is True
